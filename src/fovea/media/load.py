"""Loads the images and videos of a request from their URLs: their bytes, their checked headers, their names.

Pixels are decoded later: those of an image when the engine has room for them (`EncodedPixels`), the frames of
a video after the model has chosen them. So a request is admitted or refused by the sizes in its headers. The
event loop only waits: a bounded pool of threads reads base64 and files, checks and hashes. `MediaBudget`
bounds the bytes of encoded files that all requests hold.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, NoReturn, TypeVar

from fovea.core.errors import InvalidImage, InvalidMedia, InvalidRequest, Overloaded, RequestError
from fovea.core.measure import stage
from fovea.core.media import UNREAD, Image, Payload, Rgb, Video
from fovea.core.types import ChatPrompt, ImagePart, PlannedPrompt, Prompt, VideoPart
from fovea.media.cache import DecodedImageCache
from fovea.media.fetch.fetcher import FetchCache, Fetcher
from fovea.media.image.decode import identify
from fovea.media.image.probe import ImageHeader, check_still, probe
from fovea.media.limits import IMAGE, MIB, VIDEO, Kind, MediaLimits
from fovea.media.sandbox.decoder import LocalDecoder, MediaDecoder
from fovea.media.source import FileSource, InlineSource, RemoteSource, Source, parse_source

LARGE = 1 / 32
"""A file is large if it takes more than this share of the ceiling."""
FOR_LARGE = 3 / 4
"""Share of the ceiling that large files may fill. The rest stays for small ones."""
FOR_OWNER = 1 / 2
"""Share of the ceiling that the files of one client may fill."""
T = TypeVar("T")
Url = str | Payload


class MediaTimings(NamedTuple):
    """Seconds that a request waited for one image or video, including waits for a thread or a download slot.

    fetch_s: from the URL to a checked header, or for a video to its bytes.
    decode_s: from there to an open file, for a video. 0 for an image, which is decoded when its pixels are
        needed.
    """

    fetch_s: float
    decode_s: float


class ImageBundle(NamedTuple):
    """The images of a request and their timings, both in the order of the URLs."""

    images: tuple[Image, ...]
    timings: tuple[MediaTimings, ...]

    @property
    def wait(self) -> MediaTimings:
        """The time that the request waited."""
        return MediaTimings(
            max((timing.fetch_s for timing in self.timings), default=0.0),
            max((timing.decode_s for timing in self.timings), default=0.0),
        )


class VideoBundle(NamedTuple):
    """The open videos of a request and their timings, both in the order of the URLs."""

    videos: tuple[Video, ...]
    timings: tuple[MediaTimings, ...]

    @property
    def wait(self) -> MediaTimings:
        """The time that the request waited: the time of the slowest video."""
        return max(self.timings, key=sum, default=MediaTimings(0.0, 0.0))


class MediaLoader:
    """Loads the images and videos of requests within `limits`.

    fetcher: None: a `FetchCache` that stores nothing.
    executor: None: a pool of limits.decode_threads threads.
    image_cache: None: decoded images are not stored.
    decoder: None: files are decoded in this process.
    clock: returns the time in seconds.
    budget: counts the bytes of the files that requests hold.

    `aclose` closes fetcher, executor and decoder only if they were created here. Cached bytes and images are
    shared only between requests with the same `scope`.
    """

    def __init__(
        self,
        limits: MediaLimits,
        fetcher: FetchCache | None = None,
        executor: ThreadPoolExecutor | None = None,
        *,
        image_cache: DecodedImageCache | None = None,
        decoder: MediaDecoder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits = limits
        self._owns_fetcher, self._owns_executor = fetcher is None, executor is None
        self._owns_decoder = decoder is None
        self._fetcher = fetcher or FetchCache(Fetcher(limits))
        self._executor = executor or ThreadPoolExecutor(limits.decode_threads, "fovea-media")
        # Opening a video waits for a process that may be decoding another one. Images do not wait with it.
        self._video_executor = ThreadPoolExecutor(max(1, limits.video_workers), "fovea-videos")
        self._image_cache = image_cache or DecodedImageCache()
        self._decoder = decoder or LocalDecoder(limits)
        # One thread, so that images of requests for answers do not wait for a flood of renders.
        self._header_executor = ThreadPoolExecutor(1, "fovea-headers")
        # One thread, so that at most one image is in memory, and none waits with the headers of others.
        self._decode_executor = ThreadPoolExecutor(1, "fovea-decode")
        self.budget = MediaBudget(limits.max_media_mib * MIB)
        self._clock = clock

    async def load_all(self, urls: Sequence[Url], params: Sequence[str] | None = None) -> tuple[Image, ...]:
        """Load the images of one request, in order. Raises as `load_timed` does."""
        return (await self.load_timed(urls, params)).images

    async def load_timed(
        self, urls: Sequence[Url], params: Sequence[str] | None = None, scope: str = "", owner: str = ""
    ) -> ImageBundle:
        """Load the images of one request with their timings, in order.

        params: JSON path of each URL in the request, for errors.
        owner: the client, who may fill a part of the ceiling for files only; "": nobody in particular.
        Raises InvalidRequest or InvalidImage for images that cannot be used, Forbidden for URLs that the
        limits exclude. An error of one image names its index and its path.
        """
        self._check_count(urls, params)
        timed = await _gather([self._load(url, scope, owner) for url in urls], params)
        images = tuple(image for image, _ in timed)
        self.check_pixels(images)
        return ImageBundle(images, tuple(timings for _, timings in timed))

    async def load_headers(
        self, urls: Sequence[Url], params: Sequence[str] | None = None, scope: str = ""
    ) -> ImageBundle:
        """Load the images of one request without their pixels, in order: no file is kept or decoded.

        Checks and errors are those of `load_timed`, which takes the same arguments.
        """
        self._check_count(urls, params)
        started = self._clock()
        sources = [self._source(url, index, params) for index, url in enumerate(urls)]
        remote = [index for index, source in enumerate(sources) if isinstance(source, RemoteSource)]
        names = None if params is None else [params[index] for index in remote]
        images: dict[int, Image] = {}
        if remote:  # else nothing is waited for
            loaded = await _gather([self._describe(sources[index], scope) for index in remote], names)
            images |= zip(remote, loaded, strict=True)
        if len(remote) < len(sources):
            loop = asyncio.get_running_loop()
            images |= await loop.run_in_executor(self._header_executor, self._describe_local, sources, params)
        for url in urls:
            if isinstance(url, Payload):
                url.drop()
        ordered = tuple(images[index] for index in range(len(urls)))
        self.check_pixels(ordered)
        return ImageBundle(ordered, (MediaTimings(self._clock() - started, 0.0),) * len(urls))

    def _check_count(self, urls: Sequence[Url], params: Sequence[str] | None) -> None:
        if len(urls) > self.limits.max_images:
            raise InvalidRequest(
                f"the request has {len(urls)} images; accepted: at most {self.limits.max_images}",
                param=params[self.limits.max_images] if params else None,
                code="too_many_images",
            )

    def check_pixels(self, images: Sequence[Image]) -> None:
        """Raise InvalidRequest if the images of a request have too many pixels together."""
        pixels = sum(image.width * image.height for image in images)
        if pixels > self.limits.max_request_pixels:
            raise InvalidRequest(
                f"the request's {len(images)} images have {pixels} pixels together; "
                f"accepted: at most {self.limits.max_request_pixels}",
                code="image_too_large",
            )

    def lend(self, image: Image, owner: str = "") -> Image:
        """Return a stored image for one request, which holds its file like any other one.

        Raises Overloaded if there is no room for the file.
        """
        if not isinstance(image.pixels, EncodedPixels):
            return image
        pixels = replace(image.pixels)
        self.budget.hold(pixels, pixels.size, owner)
        return Image(image.identity, image.width, image.height, pixels)

    def release(self, prompt: Prompt) -> None:
        """Count the files of a request no longer. The request has ended."""
        if isinstance(prompt, PlannedPrompt):
            for planned in prompt.images:
                self.budget.release(planned.image.pixels)
        if not isinstance(prompt, ChatPrompt):
            return
        for message in prompt.messages:
            for part in message.parts:
                if isinstance(part, ImagePart):
                    self.budget.release(part.image.pixels)
                elif isinstance(part, VideoPart):
                    self.budget.release(part.video.source)

    async def _load(self, url: Url, scope: str, owner: str) -> tuple[Image, MediaTimings]:
        """Read the bytes of one image and check its header."""
        started = self._clock()
        source = parse_source(url, self.limits)
        remote = source.url if isinstance(source, RemoteSource) else ""
        if isinstance(source, RemoteSource):
            data = await self._fetcher.fetch(remote, IMAGE, scope)
            with self._drop_if_invalid(remote, IMAGE, scope):
                header, identity = await self._in_thread(self._inspect, data)
        else:
            header, identity, data = await self._in_thread(self._read_local, source)
            if isinstance(url, Payload):
                url.drop()
        on_invalid = partial(self._forget_later, asyncio.get_running_loop(), remote, scope)
        pixels = EncodedPixels(data, header, identity, self._decoder, self._image_cache, scope, on_invalid)
        self.budget.hold(pixels, len(data), owner)
        image = Image(identity, header.width, header.height, pixels)
        return image, MediaTimings(self._clock() - started, 0.0)

    def _source(self, url: Url, index: int, params: Sequence[str] | None) -> Source:
        try:
            return parse_source(url, self.limits)
        except RequestError as error:
            _raise_at(error, index, params[index] if params else None, IMAGE)

    async def _describe(self, source: Source, scope: str) -> Image:
        """Download an image and describe it by its header."""
        assert isinstance(source, RemoteSource)
        data = await self._fetcher.fetch(source.url, IMAGE, scope)
        with self._drop_if_invalid(source.url, IMAGE, scope):
            header, identity = await self._in_thread(self._inspect, data)
        return Image(identity, header.width, header.height, UNREAD)

    def _describe_local(self, sources: Sequence[Source], params: Sequence[str] | None) -> dict[int, Image]:
        """Describe images that are not remote by their headers. For a worker thread: one call for all."""
        images = {}
        for index, source in enumerate(sources):
            if not isinstance(source, RemoteSource):
                try:
                    header, identity, _ = self._read_local(source)
                except RequestError as error:
                    _raise_at(error, index, params[index] if params else None, IMAGE)
                images[index] = Image(identity, header.width, header.height, UNREAD)
        return images

    async def decode(self, image: Image) -> None:
        """Decode an image, to see whether that is possible. Raises InvalidImage without an index."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._decode_executor, lambda: image.rgb and None)

    async def open_videos(
        self, urls: Sequence[Url], params: Sequence[str] | None = None, scope: str = "", owner: str = ""
    ) -> VideoBundle:
        """Open the videos of one request, in order. The arguments are those of `load_timed`.

        Raises InvalidRequest for too many videos, and InvalidVideo or Forbidden with an index.
        """
        if len(urls) > self.limits.max_videos:
            raise InvalidRequest(
                f"the request has {len(urls)} videos; accepted: at most {self.limits.max_videos}",
                param=params[self.limits.max_videos] if params else None,
                code="too_many_videos",
            )
        timed = await _gather([self._open_video(url, scope, owner) for url in urls], params, VIDEO)
        return VideoBundle(tuple(video for video, _ in timed), tuple(timings for _, timings in timed))

    async def _open_video(self, url: Url, scope: str, owner: str) -> tuple[Video, MediaTimings]:
        started = self._clock()
        source = parse_source(url, self.limits, VIDEO)
        remote = source.url if isinstance(source, RemoteSource) else ""
        if isinstance(source, RemoteSource):
            data = await self._fetcher.fetch(remote, VIDEO, scope)
        else:
            data = await self._in_thread(source.read, self.limits)
            if isinstance(url, Payload):
                url.drop()
        arrival = self._clock()
        with self._drop_if_invalid(remote, VIDEO, scope):
            opening = partial(self._decoder.open_video, data, scope)
            video = await asyncio.get_running_loop().run_in_executor(self._video_executor, opening)
        self.budget.hold(video.source, len(data), owner)
        return video, MediaTimings(arrival - started, self._clock() - arrival)

    def warm_up(self) -> None:
        """Start the processes that decode, so that the first request does not wait. For a worker thread."""
        self._decoder.warm_up()

    def stats(self) -> dict[str, float]:
        """Return numbers by their names in `observe.table`."""
        held = {"media_held_bytes": self.budget.held, "media_held_capacity_bytes": self.budget.capacity}
        return held | self._decoder.stats()

    async def aclose(self) -> None:
        if self._owns_fetcher:
            await self._fetcher.aclose()
        if self._owns_decoder:
            self._decoder.close()
        self._video_executor.shutdown(wait=False, cancel_futures=True)
        self._header_executor.shutdown(wait=False, cancel_futures=True)
        self._decode_executor.shutdown(wait=False, cancel_futures=True)
        if self._owns_executor:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _forget_later(self, loop: asyncio.AbstractEventLoop, url: str, scope: str) -> None:
        """Drop cached bytes whose pixels cannot be decoded. Called in another thread."""
        if url:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._fetcher.forget, url, IMAGE, scope)

    @contextmanager
    def _drop_if_invalid(self, url: str, kind: Kind, scope: str) -> Iterator[None]:
        """Drop the cached bytes of a URL if they are invalid: the next download may be complete."""
        try:
            yield
        except InvalidMedia:
            if url:
                self._fetcher.forget(url, kind, scope)
            raise

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def _read_local(self, source: InlineSource | FileSource) -> tuple[ImageHeader, str, bytes]:
        with stage("fetch"):
            data = source.read(self.limits)
            return *self._inspect(data), data

    def _inspect(self, data: bytes) -> tuple[ImageHeader, str]:
        """Return the checked header and the identity."""
        header = probe(data, self.limits)
        check_still(header, self.limits)
        return header, identify(data, header)


async def _gather(
    work: Sequence[Awaitable[T]], params: Sequence[str] | None, kind: Kind = IMAGE
) -> tuple[T, ...]:
    """Return all results in order, or the first error with its index. An error cancels the other tasks."""

    async def one(index: int, step: Awaitable[T]) -> T:
        try:
            return await step
        except RequestError as error:
            _raise_at(error, index, params[index] if params else None, kind)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, step)) for index, step in enumerate(work)]
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return tuple(task.result() for task in tasks)


def _raise_at(error: RequestError, index: int, param: str | None, kind: Kind) -> NoReturn:
    if isinstance(error, InvalidMedia):
        raise error.at(index, param) from error
    if isinstance(error, Overloaded):
        message = f"{kind.noun} {index}: {error.message}"
        raise Overloaded(
            message, retry_after=error.retry_after, param=param, code=error.code, scope=error.scope
        ) from error
    raise type(error)(
        f"{kind.noun} {index}: {error.message}", param=param or error.param, code=error.code
    ) from error


@dataclass(slots=True, weakref_slot=True, eq=False)
class EncodedPixels:
    """A file whose header was checked, as a `core.media.PixelSource`.

    data: the whole file. header, identity: as they were read from it.
    scope: part of the cache that the request may use.
    on_invalid: called, in the thread of `read`, if the file turns out to be damaged.
    seconds: how long the last `read` took.
    """

    data: bytes = field(repr=False)
    header: ImageHeader
    identity: str
    decoder: MediaDecoder
    cache: DecodedImageCache
    scope: str = ""
    on_invalid: Callable[[], None] = lambda: None
    seconds: float = field(default=0.0, init=False)

    @property
    def size(self) -> int:
        return len(self.data)

    def file(self) -> bytes:
        return self.data

    def read(self) -> Rgb:
        started = time.perf_counter()
        try:
            return self.cache.get(self.identity, self._decode, self.scope)
        except InvalidImage:
            self.on_invalid()
            raise
        finally:
            self.seconds = time.perf_counter() - started

    def _decode(self) -> Rgb:
        with stage("image decode"):
            return self.decoder.decode_image(self.data, self.header, self.scope)


class MediaBudget:
    """Counts the bytes of files until they are released. Thread-safe.

    capacity: ceiling in bytes.
    held: bytes that are held now.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self._by_owner: Counter[str] = Counter()
        self._releases: dict[int, weakref.finalize[[int, int, str], object]] = {}
        self._lock = threading.RLock()  # garbage collection may release a file within `hold`

    def hold(self, holder: object, size: int, owner: str = "") -> None:
        """Count a file of `size` bytes until `holder` is released, or is garbage.

        owner: the client who sent it; "" if clients are not told apart.
        Raises Overloaded if there is no room. Large files find none earlier than small ones.
        """
        most = self.capacity * (FOR_LARGE if size > self.capacity * LARGE else 1)
        with self._lock:
            if self.held and self.held + size > most:
                raise self._refusal(size, "images and videos of requests in flight take", self.held, most)
            own = self._by_owner[owner]
            if owner and own and own + size > self.capacity * FOR_OWNER:
                most = self.capacity * FOR_OWNER
                raise self._refusal(size, f"images and videos of {owner!r} in flight take", own, most)
            self.held += size
            self._by_owner[owner] += size
            self._releases[id(holder)] = weakref.finalize(holder, self._release, id(holder), size, owner)

    def release(self, holder: object) -> None:
        """Count the file of `holder` no longer. Releasing twice, or what was never held, is not an error."""
        with self._lock:
            release = self._releases.get(id(holder))
        if release is not None:
            release()

    def _release(self, key: int, size: int, owner: str) -> None:
        with self._lock:
            del self._releases[key]
            self.held -= size
            self._by_owner[owner] -= size
            if not self._by_owner[owner]:
                del self._by_owner[owner]

    @staticmethod
    def _refusal(size: int, what: str, held: int, most: float) -> Overloaded:
        return Overloaded(
            f"a file of {size} bytes has no room: {what} {held} bytes; "
            f"accepted: at most {int(most)} together",
            retry_after=1.0,
            code="media_full",
            scope="request",
        )
