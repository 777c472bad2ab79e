"""Computes the encoder's pixels in worker threads: once per image, within a ceiling in bytes.

Processed pixels are several times larger than the image they come from. A request claims them before they are
computed, and until its first token: by then the encoder has read them, or a cached output has made them
unnecessary. After that they belong to the cache of `pixel_pool`. Pixels that the cache has lost are computed
again when they are needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from fovea.core.errors import Unavailable
from fovea.engine.request.clip import PlannedFrames
from fovea.engine.request.pixel_pool import PixelPool, PoolItem
from fovea.engine.request.prompt_plan import PlannedInput, process
from fovea.engine.request.work_queue import WorkQueue
from fovea.engine.vision.processor.base import ImageProcessor, ProcessedImage

T = TypeVar("T")
VALUES_PER_PIXEL = 6
"""Three channels, doubled: frames of videos come in pairs, and tiles overlap a base view."""


class PixelTask:
    """The computation of one image's or frame group's pixels. All requests that need the pixels share it.

    Requests share a task even if they keep different visual tokens; the plan is that of the first request. A
    task refers to the decoded image, so it lives no longer than the requests about it. Cached pixels do not
    refer to their task.
    """

    def __init__(
        self,
        planned: PlannedInput,
        processor: ImageProcessor,
        workers: WorkQueue,
        pool: PixelPool,
        pixel_bytes: int,
    ) -> None:
        """pixel_bytes: approximate bytes of the values of one pixel."""
        self._planned = planned
        self._processor = processor
        self._workers = workers
        self._pool = pool
        self._pixel_bytes = pixel_bytes
        self._lock = threading.Lock()
        self._future: Future[ProcessedImage] | None = None
        self._claims = 0

    @property
    def nbytes(self) -> int:
        """An estimate of the size of the pixels, from the plan alone."""
        plan = self._planned.plan
        area = sum(height * width for height, width in plan.sizes) or plan.width * plan.height
        return area * self._pixel_bytes

    @property
    def cost(self) -> float:
        """Megapixels that have to be decoded; 0 for frames of a video, which have threads of their own."""
        if isinstance(self._planned, PlannedFrames):
            return 0.0
        return self._planned.image.width * self._planned.image.height / 1e6

    @property
    def decode_s(self) -> float:
        """Seconds that decoding the image took; 0 if its pixels were there, and for frames of a video."""
        return 0.0 if isinstance(self._planned, PlannedFrames) else self._planned.image.decode_s

    @property
    def items(self) -> tuple[PoolItem, ...]:
        """Everything that is in memory while the pixels are computed."""
        return (self, self._planned.clip) if isinstance(self._planned, PlannedFrames) else (self,)

    def start(self) -> Future[ProcessedImage]:
        """Start the computation, join it if it runs, or take cached pixels.

        A failed computation is tried again.

        Raises Unavailable when the engine has stopped.
        """
        with self._lock:
            if self._future is None or _failed(self._future):
                cached = self._pool.take(self._planned.pixel_key)
                self._future = self._submit() if cached is None else _future_of(cached)
            return self._future

    def __call__(self) -> ProcessedImage:
        """Return the pixels, for the encoder.

        Raises Unavailable when the engine has stopped, and errors of the image.

        Pixels that no request claims go to the cache.
        """
        try:
            pixels = self.start().result()
        except CancelledError as error:
            raise Unavailable("the engine has stopped") from error
        with self._lock:
            unclaimed = not self._claims
            if unclaimed:
                self._future = None
        if unclaimed:
            self._pool.keep(self._planned.pixel_key, pixels)
        return pixels

    def acquire(self) -> None:
        """Count one more claim on the pixels."""
        with self._lock:
            self._claims += 1

    def release(self) -> None:
        """Count one claim less. After the last one the pixels go to the cache.

        A computation that has not begun is cancelled. One that runs is left to finish; its result is dropped.
        """
        with self._lock:
            self._claims -= 1
            if self._claims:
                return
            future, self._future = self._future, None
        if future is not None and not future.cancel() and future.done() and not _failed(future):
            self._pool.keep(self._planned.pixel_key, future.result())

    def _submit(self) -> Future[ProcessedImage]:
        return self._workers.submit(partial(process, self._planned, self._processor), self.cost)


def _failed(future: Future[ProcessedImage]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _future_of(pixels: ProcessedImage) -> Future[ProcessedImage]:
    future: Future[ProcessedImage] = Future()
    future.set_result(pixels)
    return future


class PixelStore:
    """Registry of pixel tasks: one per image for all requests, and the threads that run them.

    Videos have threads of their own: decoding one takes seconds, and images must not wait for it.

    processor: computes pixels.
    workers: number of threads for images.
    pool: room for the pixels, and their cache.
    video_workers: number of threads for videos.
    value_bytes: bytes of one normalised value of a pixel.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        workers: int,
        pool: PixelPool,
        video_workers: int = 1,
        value_bytes: int = 4,
    ) -> None:
        self.pool = pool
        self.pixel_bytes = VALUES_PER_PIXEL * value_bytes
        self._processor = processor
        self._workers = WorkQueue(workers, "fovea-pixels")
        self._video_workers = WorkQueue(video_workers, "fovea-frames")
        self._lock = threading.Lock()
        self._tasks: WeakValueDictionary[str, PixelTask] = WeakValueDictionary()

    def task(self, planned: PlannedInput) -> PixelTask:
        """Return the task of these pixels, a new one if there is none. Thread-safe."""
        workers = self._video_workers if isinstance(planned, PlannedFrames) else self._workers
        with self._lock:
            task = self._tasks.get(planned.pixel_key)
            if task is None:
                task = PixelTask(planned, self._processor, workers, self.pool, self.pixel_bytes)
                self._tasks[planned.pixel_key] = task
            return task

    def run_with_videos(self, work: Callable[[], T]) -> Future[T]:
        """Run other work on videos in their threads. Raises Unavailable when the engine has stopped."""
        return self._video_workers.submit(work)

    def close(self) -> None:
        """Cancel the computations that have not begun."""
        self._workers.close()
        self._video_workers.close()
