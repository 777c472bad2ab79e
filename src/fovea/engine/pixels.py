"""Pixels for the encoder, made in worker threads, once per image however many ask, within a ceiling in bytes.

Processed pixels are several times larger than the image they come from. They live from the moment a request claims
them until its first token: by then the encoder has read them, or a cache has made them unnecessary. Whoever needs them
again later makes them again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

from fovea.core.errors import Unavailable
from fovea.engine.clip import PlannedFrames
from fovea.engine.prompt import Planned, process
from fovea.engine.vision.processor.base import ImageProcessor, ProcessedImage

BYTES_PER_PIXEL = 24
"""Three float32 channels, twice: temporal patches come in pairs, and tiles overlap a base view."""


class PixelTask:
    """The pixels of one planned image or group of frames, made at most once at a time; all who wait for them share it."""

    def __init__(self, planned: Planned, processor: ImageProcessor, pool: ThreadPoolExecutor) -> None:
        self._planned = planned
        self._processor = processor
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

    def start(self) -> Future[ProcessedImage]:
        """Begin, or join the work in progress. What failed is tried again."""
        with self._lock:
            if self._future is None or _failed(self._future):
                try:
                    self._future = self._pool.submit(process, self._planned, self._processor)
                except RuntimeError as error:
                    raise Unavailable("the engine has stopped") from error
            return self._future

    def __call__(self) -> ProcessedImage:
        """The pixels, for the encoder. Raises Unavailable when nobody will make them any more."""
        try:
            return self.start().result()
        except CancelledError as error:
            raise Unavailable("the engine has stopped") from error

    def use(self) -> None:
        """One more claim on the pixels."""
        with self._lock:
            self._users += 1

    def forget(self) -> None:
        """One claim less. After the last one nobody needs them; work in progress is left to finish."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            self._future = None
        if isinstance(self._planned, PlannedFrames):
            self._planned.forget()


def _failed(future: Future[ProcessedImage]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


class Claim:
    """One request's right to have its images' pixels in memory. `granted` is done when there is room for them."""

    def __init__(self, gate: PixelGate, tasks: Sequence[PixelTask], beside: int) -> None:
        self.tasks: list[PixelTask] = []
        for task in tasks:
            self.add(task)
        self.size = beside + sum(task.nbytes for task in tasks)
        self.granted: Future[None] = Future()
        self._gate = gate
        self._released = False

    def add(self, task: PixelTask) -> None:
        """One more. Later than at the beginning it was not foreseen: it is made without having been counted."""
        task.use()
        self.tasks.append(task)

    def start(self) -> list[Future[ProcessedImage]]:
        return [task.start() for task in self.tasks]

    def release(self) -> None:
        """The pixels are not needed any more, or never were. Twice is once."""
        if self._released:
            return
        self._released = True
        for task in self.tasks:
            task.forget()
        self._gate.release(self)


class PixelGate:
    """Claims in the order of their arrival, within `capacity` bytes; a claim larger than that passes alone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = 0
        self._held: set[Claim] = set()
        self._waiting: deque[Claim] = deque()
        self._lock = threading.Lock()

    def claim(self, tasks: Sequence[PixelTask], beside: int = 0) -> Claim:
        """beside: bytes of other things that live as long."""
        claim = Claim(self, tasks, beside)
        with self._lock:
            self._waiting.append(claim)
            self._grant()
        return claim

    def release(self, claim: Claim) -> None:
        with self._lock:
            if claim in self._held:
                self._held.discard(claim)
                self.bytes -= claim.size
            elif claim in self._waiting:
                self._waiting.remove(claim)
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            claim = self._waiting[0]
            if self._held and self.bytes + claim.size > self.capacity:
                return
            self._waiting.popleft()
            self._held.add(claim)
            self.bytes += claim.size
            claim.granted.set_result(None)


class PixelStore:
    def __init__(self, processor: ImageProcessor, workers: int, capacity: int) -> None:
        self.gate = PixelGate(capacity)
        self._processor = processor
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="fovea-pixels")
        self._lock = threading.Lock()
        self._tasks: WeakValueDictionary[str, PixelTask] = WeakValueDictionary()

    def task(self, planned: Planned) -> PixelTask:
        with self._lock:
            task = self._tasks.get(planned.key)
            if task is None:
                task = PixelTask(planned, self._processor, self._pool)
                self._tasks[planned.key] = task
            return task

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
