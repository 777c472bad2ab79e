"""Values by name within a ceiling in bytes: the least recently used goes first, and each after its time to live.

The one accounting of every cache on this floor: images sent ahead, fetched bytes, decoded images.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 512
"""What an entry takes beside its value, about: a cache of a million tiny values must not stand above its ceiling."""


class _Entry(NamedTuple, Generic[V]):
    value: V
    size: int
    expires: float


class ByteCache(Generic[K, V]):
    """For one thread, as the event loop is.

    capacity: bytes; 0 keeps nothing. ttl_s: seconds for which a value is kept after it was put; 0: no limit.
    bytes: of all entries, each with ENTRY_BYTES. hits, misses: counted by whoever looks (`count`), who knows what a look
    was good for. evictions: entries that went for room; expired: for their age.
    """

    def __init__(
        self, capacity: int, ttl_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.capacity = capacity
        self.ttl_s = ttl_s
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.expired = 0
        self._clock = clock
        self._used: OrderedDict[K, _Entry[V]] = OrderedDict()
        # In the order of their ends, which is that of their beginnings: all live equally long.
        self._ages: OrderedDict[K, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def put(self, name: K, value: V, size: int) -> bool:
        """Keep a value of `size` bytes, in the place of an older one. False: it is larger than the cache."""
        self.drop(name)
        size += ENTRY_BYTES
        if size > self.capacity:
            return False
        expires = self._clock() + self.ttl_s if self.ttl_s else float("inf")
        self._used[name] = _Entry(value, size, expires)
        self._ages[name] = expires
        self.bytes += size
        self.drop_expired()
        while self.bytes > self.capacity:
            self.drop(next(iter(self._used)))
            self.evictions += 1
        return True

    def find(self, name: K) -> V | None:
        """The value, which is the last to go from now on; None if it is not here, or its time is over."""
        entry = self._used.get(name)
        if entry is None:
            return None
        if entry.expires <= self._clock():
            self.drop(name)
            self.expired += 1
            return None
        self._used.move_to_end(name)
        return entry.value

    def count(self, *, hit: bool) -> None:
        if hit:
            self.hits += 1
        else:
            self.misses += 1

    def drop(self, name: K) -> bool:
        """Whether it was here."""
        entry = self._used.pop(name, None)
        if entry is None:
            return False
        del self._ages[name]
        self.bytes -= entry.size
        return True

    def drop_expired(self) -> None:
        now = self._clock()
        while self._ages:
            name, expires = next(iter(self._ages.items()))
            if expires > now:
                return
            self.drop(name)
            self.expired += 1

    def clear(self) -> None:
        self._used.clear()
        self._ages.clear()
        self.bytes = 0

    def stats(self, prefix: str) -> dict[str, float]:
        """By the names of `observe.table`."""
        self.drop_expired()
        return {
            f"{prefix}_bytes": self.bytes,
            f"{prefix}_capacity_bytes": self.capacity,
            f"{prefix}_entries": len(self),
            f"{prefix}_hits": self.hits,
            f"{prefix}_misses": self.misses,
            f"{prefix}_evictions": self.evictions,
            f"{prefix}_expired": self.expired,
        }
