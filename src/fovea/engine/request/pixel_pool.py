"""Room for processed pixels: claims in the order of their arrival, and a cache in what they leave.

A request claims the bytes of its pixels before they are made, and lets go of them with its first token. Pixels that
nobody claims any more may stay, least recently used out first, until a claim needs the room: a claim waits for other
claims, never for them. The ceiling is on both together. Who claims nothing, as text and known images do, never waits.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from fovea.engine.vision.processor.base import ProcessedImage


class Claimed(Protocol):
    """What can be claimed: something of about `nbytes` bytes that is needed from `use` to `forget`."""

    @property
    def nbytes(self) -> int: ...

    def use(self) -> None: ...

    def forget(self) -> None: ...


class Claim:
    """One request's right to have things in memory. `granted` is done when there is room for them."""

    def __init__(self, pool: PixelPool, things: Iterable[Claimed], beside: int) -> None:
        self._things = dict.fromkeys(things)
        self.size = beside + sum(thing.nbytes for thing in self._things)
        self.granted: Future[None] = Future()
        self._pool = pool
        self._lock = threading.Lock()
        self._released = False
        for thing in self._things:
            thing.use()

    def add(self, thing: Claimed, *, foreseen: bool = False) -> None:
        """One more, unless it is claimed already or all was let go. What was not foreseen is counted from now on, beyond
        the ceiling if need be."""
        with self._lock:
            if self._released or thing in self._things:
                return
            self._things[thing] = None
            thing.use()
        if not foreseen:
            self._pool.grow(self, thing.nbytes)

    def release(self) -> None:
        """None of it is needed any more, or ever was. Twice is once."""
        with self._lock:
            if self._released:
                return
            self._released = True
            things, self._things = self._things, {}
        # First the room, so that what is forgotten now finds some to stay in.
        self._pool.release(self)
        for thing in things:
            thing.forget()


@dataclass(slots=True)
class PixelStats:
    """claimed: bytes that requests have claimed. bytes, entries: pixels that nobody claims; the rest counts them, too."""

    claimed: int = 0
    bytes: int = 0
    entries: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    expired: int = 0


class _Kept(NamedTuple):
    pixels: ProcessedImage
    size: int
    since: float


class PixelPool:
    """`capacity` bytes; a claim larger than that passes alone. At most `idle` of them are a cache, of pixels that were
    claimed less than `ttl_s` seconds ago. Thread-safe."""

    def __init__(
        self,
        capacity: int,
        idle: int,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self._idle = idle
        self._ttl_s = ttl_s
        self._clock = clock
        self._held: set[Claim] = set()
        self._waiting: deque[Claim] = deque()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._stats = PixelStats()
        self._lock = threading.Lock()

    def claim(self, things: Iterable[Claimed], beside: int = 0) -> Claim:
        """beside: bytes of other things that live as long."""
        claim = Claim(self, things, beside)
        with self._lock:
            if claim.size:
                self._waiting.append(claim)
                self._grant()
            else:
                self._admit(claim)
        return claim

    def grow(self, claim: Claim, size: int) -> None:
        with self._lock:
            claim.size += size
            if claim in self._held:
                self._stats.claimed += size
                self._shrink()

    def release(self, claim: Claim) -> None:
        with self._lock:
            if claim in self._held:
                self._held.discard(claim)
                self._stats.claimed -= claim.size
            elif claim in self._waiting:
                self._waiting.remove(claim)
            self._grant()

    def keep(self, key: str, pixels: ProcessedImage) -> None:
        """Pixels that nobody claims: they stay if there is room."""
        size = sum(array.nbytes for array in pixels.arrays.values())
        with self._lock:
            self._drop(key)
            self._kept[key] = _Kept(pixels, size, self._clock())
            self._stats.bytes += size
            self._stats.entries += 1
            self._shrink()

    def take(self, key: str) -> ProcessedImage | None:
        """Pixels that were kept, for one who has claimed them; None: they have to be made."""
        with self._lock:
            self._shrink()
            kept = self._drop(key)
            self._stats.hits += kept is not None
            self._stats.misses += kept is None
            return None if kept is None else kept.pixels

    def clear(self) -> None:
        """Forget what nobody claims."""
        with self._lock:
            for key in list(self._kept):
                self._drop(key)

    def stats(self) -> PixelStats:
        with self._lock:
            return replace(self._stats)

    def _grant(self) -> None:
        while self._waiting:
            claim = self._waiting[0]
            if self._stats.claimed and self._stats.claimed + claim.size > self.capacity:
                return
            self._waiting.popleft()
            self._admit(claim)

    def _admit(self, claim: Claim) -> None:
        self._held.add(claim)
        self._stats.claimed += claim.size
        self._shrink()
        claim.granted.set_result(None)

    def _shrink(self) -> None:
        """Remove what is too old, then what claims have no room for beside them."""
        # Whoever stayed last was claimed last, so age and use have one order.
        while self._kept and self._ttl_s is not None:
            key, kept = next(iter(self._kept.items()))
            if self._clock() - kept.since < self._ttl_s:
                break
            self._drop(key)
            self._stats.expired += 1
        room = min(self._idle, self.capacity - self._stats.claimed)
        while self._kept and self._stats.bytes > room:
            self._drop(next(iter(self._kept)))
            self._stats.evictions += 1

    def _drop(self, key: str) -> _Kept | None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._stats.bytes -= kept.size
            self._stats.entries -= 1
        return kept
