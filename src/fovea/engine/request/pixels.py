"""Pixels for the encoder, made in worker threads, once per image however many ask, within a ceiling in bytes.

Processed pixels are several times larger than the image they come from. They are claimed from before they are made until
the request's first token: by then the encoder has read them, or a cache has made them unnecessary. After that they are
a cache's (`pixel_pool`); whoever needs pixels that it has lost makes them again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from fovea.core.errors import Unavailable
from fovea.engine.request.clip import PlannedFrames
from fovea.engine.request.pixel_pool import Claimed, PixelPool
from fovea.engine.request.prompt_plan import Planned, process
from fovea.engine.vision.processor.base import ImageProcessor, ProcessedImage

Made = TypeVar("Made")
BYTES_PER_PIXEL = 24
"""Three float32 channels, twice: temporal patches come in pairs, and tiles overlap a base view."""


class PixelTask:
    """The pixels of one planned image or group of frames, made at most once at a time; all who wait for them share it, even
    where they keep other tokens of it: the plan is that of whoever came first.

    It knows the decoded image, so it lives no longer than the requests about it; kept pixels do not know their task.
    """

    def __init__(
        self, planned: Planned, processor: ImageProcessor, workers: ThreadPoolExecutor, pool: PixelPool
    ) -> None:
        self._planned = planned
        self._processor = processor
        self._workers = workers
        self._pool = pool
        self._lock = threading.Lock()
        self._future: Future[ProcessedImage] | None = None
        self._users = 0

    @property
    def nbytes(self) -> int:
        """About what the pixels take, from the plan alone."""
        plan = self._planned.plan
        area = sum(height * width for height, width in plan.resized) or plan.width * plan.height
        return area * BYTES_PER_PIXEL

    @property
    def things(self) -> tuple[Claimed, ...]:
        """What is in memory while they are made."""
        return (self, self._planned.clip) if isinstance(self._planned, PlannedFrames) else (self,)

    def start(self) -> Future[ProcessedImage]:
        """Begin, or join the work in progress, or take what was kept. What failed is tried again."""
        with self._lock:
            if self._future is None or _failed(self._future):
                kept = self._pool.take(self._planned.pixels)
                self._future = self._submit() if kept is None else _done(kept)
            return self._future

    def __call__(self) -> ProcessedImage:
        """The pixels, for the encoder. Raises Unavailable when nobody will make them any more."""
        try:
            pixels = self.start().result()
        except CancelledError as error:
            raise Unavailable("the engine has stopped") from error
        with self._lock:
            unclaimed = not self._users
            if unclaimed:
                self._future = None
        if unclaimed:
            self._pool.keep(self._planned.pixels, pixels)
        return pixels

    def use(self) -> None:
        """One more claim on the pixels."""
        with self._lock:
            self._users += 1

    def forget(self) -> None:
        """One claim less. After the last one they are the cache's; work in progress is left to finish, for nobody."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            future, self._future = self._future, None
        if future is not None and future.done() and not _failed(future):
            self._pool.keep(self._planned.pixels, future.result())

    def _submit(self) -> Future[ProcessedImage]:
        try:
            return self._workers.submit(process, self._planned, self._processor)
        except RuntimeError as error:
            raise Unavailable("the engine has stopped") from error


def _failed(future: Future[ProcessedImage]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _done(pixels: ProcessedImage) -> Future[ProcessedImage]:
    future: Future[ProcessedImage] = Future()
    future.set_result(pixels)
    return future


class PixelStore:
    """Whose pixels are being made, or claimed."""

    def __init__(self, processor: ImageProcessor, workers: int, pool: PixelPool) -> None:
        self.pool = pool
        self._processor = processor
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="fovea-pixels")
        self._lock = threading.Lock()
        self._tasks: WeakValueDictionary[str, PixelTask] = WeakValueDictionary()

    def task(self, planned: Planned) -> PixelTask:
        with self._lock:
            task = self._tasks.get(planned.pixels)
            if task is None:
                task = PixelTask(planned, self._processor, self._workers, self.pool)
                self._tasks[planned.pixels] = task
            return task

    def run(self, work: Callable[[], Made]) -> Future[Made]:
        """Other work on pixels, by the same threads. Raises Unavailable when they have ended."""
        try:
            return self._workers.submit(work)
        except RuntimeError as error:
            raise Unavailable("the engine has stopped") from error

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
