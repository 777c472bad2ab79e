"""Memory for processed pixels: claims of requests, and a cache in the room that they leave.

A request claims the bytes of its pixels before they are computed, and releases the claim with its first
token. Pixels without a claim may stay in the cache until a claim needs the room; the least recently used ones
leave first. So a claim waits for other claims, but never for the cache. The ceiling is on claims and cache
together. A request that claims nothing, such as text or known images, never waits.

Claims are granted in the order of arrival, quick ones and slow ones apart. Slow ones are those of videos and
of images that take long to decode, so that the room stays claimed for long. They may fill a part of the room
only: a small image never waits for forty large ones.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from fovea.core.ledger import Ledger
from fovea.engine.vision.processor.base import ProcessedImage

FOR_SLOW = 3 / 4
"""Share of the room that slow claims may fill."""
PATIENCE_S = 30.0
"""Seconds after which a slow claim goes before quick ones."""


class PoolItem(Protocol):
    """Something of about `nbytes` bytes that claims can cover.

    It counts its claims: `acquire` adds one, `release` ends one.
    """

    @property
    def nbytes(self) -> int: ...

    def acquire(self) -> None: ...

    def release(self) -> None: ...


class Claim:
    """One request's right to have items in memory.

    size: bytes of all items and of the extra bytes.
    slow: whether computing the items takes long.
    since: time of arrival on the pool's clock.
    granted: a future that is done when there is room for them.
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
        """Claim one more item. Nothing happens if the item is claimed already, or if the claim was released.

        already_counted: the claim's extra bytes cover the item. Otherwise its bytes are added now, beyond the
            ceiling if need be.
        """
        with self._lock:
            if self._released or item in self._items:
                return
            self._items[item] = None
            item.acquire()
        if not already_counted:
            self._pool.grow(self, item.nbytes)

    def release(self) -> None:
        """End the claim on all items, granted or not. Releasing twice is no error."""
        with self._lock:
            if self._released:
                return
            self._released = True
            items, self._items = self._items, {}
        # The room is freed first, so that the items released below find room in the cache.
        self._pool.release(self)
        for item in items:
            item.release()


@dataclass(frozen=True, slots=True)
class PixelStats:
    """Counters of a pool.

    claimed_bytes: bytes of the granted claims.
    bytes, entries: size of the cache, which holds pixels without a claim.
    hits, misses, evictions, expired: events of the cache.
    """

    claimed_bytes: int
    bytes: int
    entries: int
    hits: int
    misses: int
    evictions: int
    expired: int


class PixelPool:
    """Room for claims and for a cache of pixels without a claim. Thread-safe.

    capacity: ceiling of claims and cache together, in bytes. A larger claim is granted only when nothing else
        is claimed.
    """

    def __init__(
        self,
        capacity: int,
        cache_capacity: int,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """cache_capacity: ceiling of the cache alone, in bytes.

        ttl_s: seconds after its last claim at which a cached image expires; None: never.
        """
        self.capacity = capacity
        self.clock = clock
        self._cache: Ledger[str, ProcessedImage] = Ledger(cache_capacity, ttl_s=ttl_s, clock=clock)
        self._granted: set[Claim] = set()
        self._waiting: dict[bool, deque[Claim]] = {False: deque(), True: deque()}
        self._claimed_bytes = 0
        self._hits = 0
        self._misses = 0
        self._lock = threading.Lock()

    def divide(self, owner_of: Callable[[str, object], str], share_of: Callable[[str], float]) -> None:
        """Bound every owner's cached pixels by its share of the cache.

        The arguments are those of `core.owners.Owners`.
        """
        with self._lock:
            self._cache.divide(owner_of, share_of)

    def claim(self, items: Iterable[PoolItem], extra_bytes: int = 0, *, slow: bool = False) -> Claim:
        """Claim room for items. A claim of 0 bytes is granted at once.

        extra_bytes: bytes of other data that lives as long as the claim.
        slow: whether computing the items takes long, so that the room stays claimed for long.
        """
        claim = Claim(self, items, extra_bytes, slow=slow)
        with self._lock:
            if claim.size:
                self._waiting[slow].append(claim)
                self._grant()
            else:
                self._admit(claim)
        return claim

    def grow(self, claim: Claim, size: int) -> None:
        """Add bytes to a claim, granted or not."""
        with self._lock:
            claim.size += size
            if claim in self._granted:
                self._claimed_bytes += size
                self._shrink()

    def release(self, claim: Claim) -> None:
        """Free the room of a claim, or its place in the queue."""
        with self._lock:
            if claim in self._granted:
                self._granted.discard(claim)
                self._claimed_bytes -= claim.size
            elif claim in self._waiting[claim.slow]:
                self._waiting[claim.slow].remove(claim)
            self._grant()

    def keep(self, key: str, pixels: ProcessedImage) -> None:
        """Put pixels without a claim into the cache.

        The least recently used pixels are evicted for them. Pixels larger than the room are not kept.
        """
        size = sum(array.nbytes for array in pixels.arrays.values())
        with self._lock:
            self._cache.add(key, pixels, size)
            self._cache.evict_over_share(key)
            self._shrink()

    def take(self, key: str) -> ProcessedImage | None:
        """Remove pixels from the cache and return them, for a request that has claimed them.

        None: they are not cached.
        """
        with self._lock:
            self._shrink()
            entry = self._cache.remove(key)
            self._hits += entry is not None
            self._misses += entry is None
            return None if entry is None else entry.value

    def clear(self) -> None:
        """Empty the cache. Claims stay."""
        with self._lock:
            self._cache.clear()

    def stats(self) -> PixelStats:
        with self._lock:
            cache = self._cache
            return PixelStats(
                self._claimed_bytes,
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

    def _grant_from(self, waiting: deque[Claim], most: float) -> None:
        """Grant claims in order as long as all claims together take at most so many bytes."""
        while waiting and (not self._claimed_bytes or self._claimed_bytes + waiting[0].size <= most):
            self._admit(waiting.popleft())

    def _admit(self, claim: Claim) -> None:
        self._granted.add(claim)
        self._claimed_bytes += claim.size
        self._shrink()
        claim.granted.set_result(None)

    def _shrink(self) -> None:
        """Remove expired entries, then evict entries until the cache fits beside the claims."""
        self._cache.expire()
        self._cache.evict(min(self._cache.capacity, self.capacity - self._claimed_bytes))
