"""Pixels for the encoder, made in worker threads, once per image however many ask.

Processed pixels are several times larger than the image they come from, so they live from the moment a request is
prepared until the encoder has read them. Whoever needs them again later makes them again.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

from fovea.core.errors import Unavailable
from fovea.engine.prompt import PlannedImage
from fovea.engine.vision.processor.base import ImageProcessor, ProcessedImage


class PixelTask:
    """The pixels of one planned image, made at most once at a time. Shared by all requests that wait for them."""

    def __init__(self, planned: PlannedImage, processor: ImageProcessor, pool: ThreadPoolExecutor) -> None:
        self._planned = planned
        self._processor = processor
        self._pool = pool
        self._lock = threading.Lock()
        self._future: Future[ProcessedImage] | None = None

    def start(self) -> Future[ProcessedImage]:
        """Begin, or join the work in progress. What failed is tried again."""
        with self._lock:
            if self._future is None or _failed(self._future):
                try:
                    self._future = self._pool.submit(
                        self._processor.process, self._planned.image, self._planned.plan
                    )
                except RuntimeError as error:
                    raise Unavailable("the engine has stopped") from error
            return self._future

    def wait(self) -> ProcessedImage:
        """The pixels, when they are made. Raises Unavailable when nobody will make them any more."""
        try:
            return self.start().result()
        except CancelledError as error:
            raise Unavailable("the engine has stopped") from error

    def __call__(self) -> ProcessedImage:
        """The pixels, for the encoder; they are forgotten here, since its output is what is kept."""
        pixels = self.wait()
        with self._lock:
            self._future = None
        return pixels


def _failed(future: Future[ProcessedImage]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


class PixelStore:
    def __init__(self, processor: ImageProcessor, workers: int) -> None:
        self._processor = processor
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="fovea-pixels")
        self._lock = threading.Lock()
        self._tasks: WeakValueDictionary[str, PixelTask] = WeakValueDictionary()

    def task(self, planned: PlannedImage) -> PixelTask:
        with self._lock:
            task = self._tasks.get(planned.key)
            if task is None:
                task = PixelTask(planned, self._processor, self._pool)
                self._tasks[planned.key] = task
            return task

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
