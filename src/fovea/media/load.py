"""A request's URLs to images and videos: fetch and look at every header first, then decode the images.

Two phases, so that a caller can admit or refuse a request by the sizes in the headers while no pixel is decoded
yet: `read_all`, then `decode_all`. `load_all` is both. The event loop only waits: reading base64 and files,
decoding and hashing run in a bounded pool of threads. The first image that fails cancels the others.
Videos are only opened here: which of their frames are decoded is decided by the model, after admission.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NoReturn, Protocol, TypeVar

from fovea.core.errors import InvalidMedia, InvalidRequest, RequestError
from fovea.core.image import Image
from fovea.core.stage import stage
from fovea.core.video import Video
from fovea.media.bundle import EncodedImage, ImageBundle, MediaTimings, VideoBundle
from fovea.media.fetch.cache import FetchCache
from fovea.media.fetch.fetcher import Fetcher
from fovea.media.image.cache import DecodedImageCache
from fovea.media.image.decode import decode, identify
from fovea.media.image.probe import ImageHeader, check_still, probe
from fovea.media.kind import IMAGE, VIDEO, Kind
from fovea.media.limits import MediaLimits
from fovea.media.source import FileSource, InlineSource, RemoteSource, parse_source
from fovea.media.video.decode import open_video

T = TypeVar("T")


class MediaFetcher(Protocol):
    """What the loader asks of `fetched.FetchCache`; a test may hand in anything that has it."""

    async def fetch(self, url: str, kind: Kind = IMAGE, scope: str = "") -> bytes: ...

    def forget(self, url: str, kind: Kind = IMAGE, scope: str = "") -> None: ...

    async def aclose(self) -> None: ...


class MediaLoader:
    """fetcher: None builds a guarded one that keeps nothing. executor: None builds one of limits.decode_threads threads.

    What it has built itself, `aclose` closes. decoded: None keeps no image.
    The `scope` of a request: what its images and videos were fetched and decoded to is shared within it alone.
    """

    def __init__(
        self,
        limits: MediaLimits,
        fetcher: MediaFetcher | None = None,
        executor: ThreadPoolExecutor | None = None,
        *,
        image_cache: DecodedImageCache | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits = limits
        self._owns_fetcher, self._owns_executor = fetcher is None, executor is None
        self._fetcher = fetcher or FetchCache(Fetcher(limits))
        self._executor = executor or ThreadPoolExecutor(limits.decode_threads, "fovea-media")
        self._image_cache = image_cache or DecodedImageCache()
        self._clock = clock

    async def load(self, url: str) -> Image:
        """One image. Raises InvalidImage or Forbidden, without an index."""
        return await self._decode(await self.read(url), "")

    async def load_all(self, urls: Sequence[str], params: Sequence[str] | None = None) -> tuple[Image, ...]:
        """The images of one request, in order. Errors name the image's index and, if given, params[index]."""
        return (await self.load_timed(urls, params)).images

    async def load_timed(
        self, urls: Sequence[str], params: Sequence[str] | None = None, scope: str = ""
    ) -> ImageBundle:
        return await self.decode_all(await self.read_all(urls, params, scope), params, scope)

    async def read(self, url: str, scope: str = "") -> EncodedImage:
        """Bytes and header of one image; nothing is decoded."""
        started = self._clock()
        source = parse_source(url, self.limits)
        remote = source.url if isinstance(source, RemoteSource) else ""
        if isinstance(source, RemoteSource):
            data = await self._fetcher.fetch(remote, IMAGE, scope)
            with self._forgetting(remote, IMAGE, scope):
                looked = await self._in_thread(self._look, data)
        else:
            looked = await self._in_thread(self._read_local, source)
        return EncodedImage(*looked, url=remote, fetch_s=self._clock() - started)

    async def read_all(
        self, urls: Sequence[str], params: Sequence[str] | None = None, scope: str = ""
    ) -> tuple[EncodedImage, ...]:
        """Every image's bytes and header. Raises InvalidRequest for too many images or pixels altogether."""
        if len(urls) > self.limits.max_images:
            raise InvalidRequest(
                f"the request has {len(urls)} images; accepted: at most {self.limits.max_images}",
                param=params[self.limits.max_images] if params else None,
                code="too_many_images",
            )
        encoded = await _together([self.read(url, scope) for url in urls], params)
        pixels = sum(image.header.pixels for image in encoded)
        if pixels > self.limits.max_request_pixels:
            raise InvalidRequest(
                f"the request's {len(urls)} images have {pixels} pixels together; "
                f"accepted: at most {self.limits.max_request_pixels}",
                code="image_too_large",
            )
        return encoded

    async def open_videos(
        self, urls: Sequence[str], params: Sequence[str] | None = None, scope: str = ""
    ) -> VideoBundle:
        """The videos of one request, in order, within the limits."""
        if len(urls) > self.limits.max_videos:
            raise InvalidRequest(
                f"the request has {len(urls)} videos; accepted: at most {self.limits.max_videos}",
                param=params[self.limits.max_videos] if params else None,
                code="too_many_videos",
            )
        timed = await _together([self._open_video(url, scope) for url in urls], params, VIDEO)
        return VideoBundle(tuple(video for video, _ in timed), tuple(timings for _, timings in timed))

    async def _open_video(self, url: str, scope: str) -> tuple[Video, MediaTimings]:
        started = self._clock()
        source = parse_source(url, self.limits, VIDEO)
        remote = source.url if isinstance(source, RemoteSource) else ""
        if isinstance(source, RemoteSource):
            data = await self._fetcher.fetch(remote, VIDEO, scope)
        else:
            data = await self._in_thread(source.read, self.limits)
        there = self._clock()
        with self._forgetting(remote, VIDEO, scope):
            video = await self._in_thread(open_video, data, self.limits)
        return video, MediaTimings(there - started, self._clock() - there)

    async def decode_all(
        self, encoded: Sequence[EncodedImage], params: Sequence[str] | None = None, scope: str = ""
    ) -> ImageBundle:
        timed = await _together([self._decode_timed(image, scope) for image in encoded], params)
        return ImageBundle(tuple(image for image, _ in timed), tuple(timings for _, timings in timed))

    async def aclose(self) -> None:
        if self._owns_fetcher:
            await self._fetcher.aclose()
        if self._owns_executor:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _decode_timed(self, image: EncodedImage, scope: str) -> tuple[Image, MediaTimings]:
        started = self._clock()
        decoded = await self._decode(image, scope)
        return decoded, MediaTimings(image.fetch_s, self._clock() - started)

    async def _decode(self, image: EncodedImage, scope: str) -> Image:
        async def work() -> Image:
            return await self._in_thread(decode, image.data, self.limits, image.identity)

        with self._forgetting(image.url, IMAGE, scope):
            return await self._image_cache.get(image.identity, work, scope)

    @contextmanager
    def _forgetting(self, url: str, kind: Kind, scope: str) -> Iterator[None]:
        """Fetched bytes that turn out to be broken are not kept: they may be whole the next time."""
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
            return self._look(source.read(self.limits))

    def _look(self, data: bytes) -> tuple[ImageHeader, str, bytes]:
        header = probe(data, self.limits)
        check_still(header, self.limits)
        return header, identify(data, header), data


async def _together(
    work: Sequence[Awaitable[T]], params: Sequence[str] | None, kind: Kind = IMAGE
) -> tuple[T, ...]:
    """All results in order, or the first error with its index; the unfinished rest is cancelled and awaited."""

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
    raise type(error)(
        f"{kind.noun} {index}: {error.message}", param=param or error.param, code=error.code
    ) from error
