"""Pixels for the encoder: computed once per image in worker threads, within a ceiling in bytes.

The pool counts the memory that requests reserve, and caches pixels in the rest.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from fovea.core.errors import Unavailable
from fovea.core.ledger import Ledger
from fovea.engine.request.prompt_plan import PlannedFrames, PlannedInput, process
from fovea.engine.request.work_queue import WorkQueue
from fovea.engine.vision.processor.base import ImageProcessor, ProcessedImage

FOR_SLOW = 3 / 4
"""Share of the pool that slow reservations may fill."""
PATIENCE_S = 30.0
"""Seconds after which a slow reservation goes before quick ones."""
T = TypeVar("T")
VALUES_PER_PIXEL = 6
"""Three channels, doubled: frames of videos come in pairs, and tiles overlap a base view."""


class PixelStore:
    """Registry of pixel tasks: one per image for all requests, and the threads that run them.

    Processed pixels are several times larger than the image they come from. A request reserves memory for
    them before they are computed, and until its first token: by then the encoder has read them, or a cached
    output has made them unnecessary. After that they belong to the cache of the pool. Pixels that the cache
    has lost are computed again when they are needed.

    Videos have threads of their own: decoding one takes seconds, and images must not wait for it.

    processor: computes pixels.
    workers: number of threads for images.
    pool: memory for the pixels, and their cache.
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
        self._reservations = 0

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

        Pixels that no request has reserved go to the cache.
        """
        try:
            pixels = self.start().result()
        except CancelledError as error:
            raise Unavailable("the engine has stopped") from error
        with self._lock:
            unreserved = not self._reservations
            if unreserved:
                self._future = None
        if unreserved:
            self._pool.keep(self._planned.pixel_key, pixels)
        return pixels

    def acquire(self) -> None:
        """Count one more reservation of the pixels."""
        with self._lock:
            self._reservations += 1

    def release(self) -> None:
        """Count one reservation less. After the last one the pixels go to the cache.

        A computation that has not begun is cancelled. One that runs is left to finish; its result is dropped.
        """
        with self._lock:
            self._reservations -= 1
            if self._reservations:
                return
            future, self._future = self._future, None
        if future is not None and not future.cancel() and future.done() and not _failed(future):
            self._pool.keep(self._planned.pixel_key, future.result())

    def _submit(self) -> Future[ProcessedImage]:
        return self._workers.submit(partial(process, self._planned, self._processor), self.cost)


class PixelPool:
    """Memory for reserved pixels, and for a cache of pixels that no request has reserved. Thread-safe.

    A request reserves the bytes of its pixels before they are computed, and releases them with its first
    token. Other pixels may stay in the cache until a reservation needs their memory; the least recently used
    ones are evicted first. So a reservation waits for others, but never for the cache. The ceiling is on
    reservations and cache together. A request that reserves nothing, such as text or known images, never
    waits.

    Reservations are granted in the order of arrival, quick ones and slow ones apart. Slow ones are those of
    videos and of images that take long to decode, so that memory stays reserved for long. They may fill
    a part of the pool only: a small image never waits for forty large ones.

    capacity: ceiling of reservations and cache together, in bytes. A larger reservation is granted only when
        nothing else is reserved.
    """

    def __init__(
        self,
        capacity: int,
        cache_capacity: int,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """cache_capacity: ceiling of the cache alone, in bytes.

        ttl_s: seconds after its last reservation at which a cached image expires; None: never.
        """
        self.capacity = capacity
        self.clock = clock
        self._cache: Ledger[str, ProcessedImage] = Ledger(cache_capacity, ttl_s=ttl_s, clock=clock)
        self._granted: set[Reservation] = set()
        self._waiting: dict[bool, deque[Reservation]] = {False: deque(), True: deque()}
        self._reserved_bytes = 0
        self._hits = 0
        self._misses = 0
        self._lock = threading.Lock()

    def divide(self, owner_of: Callable[[str, object], str], share_of: Callable[[str], float]) -> None:
        """Bound every owner's cached pixels by its share of the cache.

        The arguments are those of `core.owners.Owners`.
        """
        with self._lock:
            self._cache.divide(owner_of, share_of)

    def reserve(self, items: Iterable[PoolItem], extra_bytes: int = 0, *, slow: bool = False) -> Reservation:
        """Reserve memory for items. A reservation of 0 bytes is granted at once.

        extra_bytes: bytes of other data that lives as long as the reservation.
        slow: whether computing the items takes long, so that memory stays reserved for long.
        """
        reservation = Reservation(self, items, extra_bytes, slow=slow)
        with self._lock:
            if reservation.size:
                self._waiting[slow].append(reservation)
                self._grant()
            else:
                self._admit(reservation)
        return reservation

    def grow(self, reservation: Reservation, size: int) -> None:
        """Add bytes to a reservation, granted or not."""
        with self._lock:
            reservation.size += size
            if reservation in self._granted:
                self._reserved_bytes += size
                self._shrink()

    def release(self, reservation: Reservation) -> None:
        """Free the memory of a reservation, or its place in the queue."""
        with self._lock:
            if reservation in self._granted:
                self._granted.discard(reservation)
                self._reserved_bytes -= reservation.size
            elif reservation in self._waiting[reservation.slow]:
                self._waiting[reservation.slow].remove(reservation)
            self._grant()

    def keep(self, key: str, pixels: ProcessedImage) -> None:
        """Put pixels without a reservation into the cache.

        The least recently used pixels are evicted for them. Pixels larger than the cache are not kept.
        """
        size = sum(array.nbytes for array in pixels.arrays.values())
        with self._lock:
            self._cache.add(key, pixels, size)
            self._cache.evict_over_share(key)
            self._shrink()

    def take(self, key: str) -> ProcessedImage | None:
        """Remove pixels from the cache and return them, for a request that has reserved them.

        None: they are not cached.
        """
        with self._lock:
            self._shrink()
            entry = self._cache.remove(key)
            self._hits += entry is not None
            self._misses += entry is None
            return None if entry is None else entry.value

    def clear(self) -> None:
        """Empty the cache. Reservations stay."""
        with self._lock:
            self._cache.clear()

    def stats(self) -> PixelStats:
        with self._lock:
            cache = self._cache
            return PixelStats(
                self._reserved_bytes,
                cache.bytes,
                len(cache),
                self._hits,
                self._misses,
                cache.evictions,
                cache.expirations,
            )

    def _grant(self) -> None:
        quick, slow = self._waiting[False], self._waiting[True]
        late = bool(slow) and self.clock() - slow[0].since >= PATIENCE_S
        if late:
            self._grant_from(slow, self.capacity)
        if not (late and slow):
            self._grant_from(quick, self.capacity)
            self._grant_from(slow, FOR_SLOW * self.capacity)

    def _grant_from(self, waiting: deque[Reservation], most: float) -> None:
        """Grant reservations in order as long as all reservations together take at most so many bytes."""
        while waiting and (not self._reserved_bytes or self._reserved_bytes + waiting[0].size <= most):
            self._admit(waiting.popleft())

    def _admit(self, reservation: Reservation) -> None:
        self._granted.add(reservation)
        self._reserved_bytes += reservation.size
        self._shrink()
        reservation.granted.set_result(None)

    def _shrink(self) -> None:
        """Remove expired entries, then evict entries until the cache fits beside the reservations."""
        self._cache.expire()
        self._cache.evict(min(self._cache.capacity, self.capacity - self._reserved_bytes))


class Reservation:
    """Memory granted to one request for its items before they are computed.

    size: bytes of all items and of the extra bytes.
    slow: whether computing the items takes long.
    since: time of arrival on the pool's clock.
    granted: a future that is done when there is memory for them.
    """

    def __init__(self, pool: PixelPool, items: Iterable[PoolItem], extra_bytes: int, *, slow: bool) -> None:
        self._items = dict.fromkeys(items)
        self.size = extra_bytes + sum(item.nbytes for item in self._items)
        self.granted: Future[None] = Future()
        self.slow = slow
        self.since = pool.clock()
        self._pool = pool
        self._lock = threading.Lock()
        self._released = False
        for item in self._items:
            item.acquire()

    def add(self, item: PoolItem, *, already_counted: bool = False) -> None:
        """Reserve one more item. Nothing happens if it is reserved already, or after `release`.

        already_counted: the reservation's extra bytes cover the item. Otherwise its bytes are added now,
            beyond the ceiling if need be.
        """
        with self._lock:
            if self._released or item in self._items:
                return
            self._items[item] = None
            item.acquire()
        if not already_counted:
            self._pool.grow(self, item.nbytes)

    def release(self) -> None:
        """End the reservation of all items, granted or not. A second call does nothing."""
        with self._lock:
            if self._released:
                return
            self._released = True
            items, self._items = self._items, {}
        # The memory is freed first, so that the items released below fit into the cache.
        self._pool.release(self)
        for item in items:
            item.release()


class PoolItem(Protocol):
    """Something of about `nbytes` bytes that reservations can cover.

    It counts its reservations: `acquire` adds one, `release` ends one.
    """

    @property
    def nbytes(self) -> int: ...

    def acquire(self) -> None: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PixelStats:
    """Counters of a pool.

    reserved_bytes: bytes of the granted reservations.
    bytes, entries: size of the cache, which holds pixels without a reservation.
    hits, misses, evictions, expired: events of the cache.
    """

    reserved_bytes: int
    bytes: int
    entries: int
    hits: int
    misses: int
    evictions: int
    expired: int


def _failed(future: Future[ProcessedImage]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _future_of(pixels: ProcessedImage) -> Future[ProcessedImage]:
    future: Future[ProcessedImage] = Future()
    future.set_result(pixels)
    return future
