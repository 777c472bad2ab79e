"""Loads the images and videos of a request from their URLs: first all headers, then the pixels of the images.

There are two phases, `read_all` and `decode_all`, so that a caller can admit or refuse a request by the sizes
in the headers before any pixel is decoded. `load_all` runs both. The event loop only waits: a bounded pool of
threads reads base64 and files, decodes and hashes. The first image that fails cancels the others.
Videos are only opened here. The model chooses the frames to decode after admission.
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
    """The methods of `fetch.cache.FetchCache` that the loader uses; a test can replace them."""

    async def fetch(self, url: str, kind: Kind = IMAGE, scope: str = "") -> bytes: ...

    def forget(self, url: str, kind: Kind = IMAGE, scope: str = "") -> None: ...

    async def aclose(self) -> None: ...


class MediaLoader:
    """Loads the images and videos of requests within `limits`.

    fetcher: None: a `FetchCache` that stores nothing.
    executor: None: a pool of limits.decode_threads threads.
    image_cache: None: decoded images are not stored.
    clock: returns the time in seconds.

    `aclose` closes the fetcher and the executor only if they were created here. Cached bytes and images are
    shared only between requests with the same `scope`.
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

    async def load_all(self, urls: Sequence[str], params: Sequence[str] | None = None) -> tuple[Image, ...]:
        """Load the images of one request, in order. Raises as `load_timed` does."""
        return (await self.load_timed(urls, params)).images

    async def load_timed(
        self, urls: Sequence[str], params: Sequence[str] | None = None, scope: str = ""
    ) -> ImageBundle:
        """Load the images of one request with their timings, in order.

        params: JSON path of each URL in the request, for errors.
        Raises InvalidRequest or InvalidImage for images that cannot be used, Forbidden for URLs that the
        limits exclude. An error of one image names its index and its path.
        """
        return await self.decode_all(await self.read_all(urls, params, scope), params, scope)

    async def read(self, url: str, scope: str = "") -> EncodedImage:
        """Read the bytes of one image and check its header; its pixels are not decoded.

        Raises InvalidImage or Forbidden, without an index.
        """
        started = self._clock()
        source = parse_source(url, self.limits)
        remote = source.url if isinstance(source, RemoteSource) else ""
        if isinstance(source, RemoteSource):
            data = await self._fetcher.fetch(remote, IMAGE, scope)
            with self._drop_if_invalid(remote, IMAGE, scope):
                header, identity = await self._in_thread(self._inspect, data)
        else:
            header, identity, data = await self._in_thread(self._read_local, source)
        return EncodedImage(header, identity, data, url=remote, fetch_s=self._clock() - started)

    async def read_all(
        self, urls: Sequence[str], params: Sequence[str] | None = None, scope: str = ""
    ) -> tuple[EncodedImage, ...]:
        """Read the bytes and check the header of every image.

        Raises as `read` does, with an index, and InvalidRequest for too many images or too many pixels in
        all.
        """
        if len(urls) > self.limits.max_images:
            raise InvalidRequest(
                f"the request has {len(urls)} images; accepted: at most {self.limits.max_images}",
                param=params[self.limits.max_images] if params else None,
                code="too_many_images",
            )
        encoded = await _gather([self.read(url, scope) for url in urls], params)
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
        """Open the videos of one request, in order.

        Raises InvalidRequest for too many videos, and InvalidVideo or Forbidden with an index.
        """
        if len(urls) > self.limits.max_videos:
            raise InvalidRequest(
                f"the request has {len(urls)} videos; accepted: at most {self.limits.max_videos}",
                param=params[self.limits.max_videos] if params else None,
                code="too_many_videos",
            )
        timed = await _gather([self._open_video(url, scope) for url in urls], params, VIDEO)
        return VideoBundle(tuple(video for video, _ in timed), tuple(timings for _, timings in timed))

    async def _open_video(self, url: str, scope: str) -> tuple[Video, MediaTimings]:
        started = self._clock()
        source = parse_source(url, self.limits, VIDEO)
        remote = source.url if isinstance(source, RemoteSource) else ""
        if isinstance(source, RemoteSource):
            data = await self._fetcher.fetch(remote, VIDEO, scope)
        else:
            data = await self._in_thread(source.read, self.limits)
        arrival = self._clock()
        with self._drop_if_invalid(remote, VIDEO, scope):
            video = await self._in_thread(open_video, data, self.limits)
        return video, MediaTimings(arrival - started, self._clock() - arrival)

    async def decode_all(
        self, encoded: Sequence[EncodedImage], params: Sequence[str] | None = None, scope: str = ""
    ) -> ImageBundle:
        """Decode the images that `read_all` returned. Raises InvalidImage with an index."""
        timed = await _gather([self._decode_timed(image, scope) for image in encoded], params)
        return ImageBundle(tuple(image for image, _ in timed), tuple(timings for _, timings in timed))

    async def aclose(self) -> None:
        if self._owns_fetcher:
            await self._fetcher.aclose()
        if self._owns_executor:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _decode_timed(self, image: EncodedImage, scope: str) -> tuple[Image, MediaTimings]:
        started = self._clock()
        pixels = await self._decode(image, scope)
        return pixels, MediaTimings(image.fetch_s, self._clock() - started)

    async def _decode(self, image: EncodedImage, scope: str) -> Image:
        async def work() -> Image:
            return await self._in_thread(decode, image.data, self.limits, image.identity)

        with self._drop_if_invalid(image.url, IMAGE, scope):
            return await self._image_cache.get(image.identity, work, scope)

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
    raise type(error)(
        f"{kind.noun} {index}: {error.message}", param=param or error.param, code=error.code
    ) from error
