"""A least-recently-used cache with a ceiling in bytes and a time to live.

It does the accounting of every cache on this floor: uploaded images, fetched bytes, decoded images.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 512
"""Estimated bytes of an entry beside its value, so that a million tiny values do not exceed the ceiling."""


class _Entry(NamedTuple, Generic[V]):
    value: V
    size: int
    expires: float


class ByteCache(Generic[K, V]):
    """A mapping that evicts its least recently used values for room, and drops values that are too old.

    Not thread-safe: use it from one thread, for example the event loop's.

    capacity: ceiling in bytes; 0 stores nothing.
    ttl_s: seconds for which a value is stored after it was put; 0: no limit.
    bytes: size of all entries, each including ENTRY_BYTES.
    hits, misses: counted by the caller with `count`, because only the caller knows whether an entry was
        usable.
    evictions: entries removed for lack of room.
    expirations: entries removed because of age.
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
        self.expirations = 0
        self._clock = clock
        # In order of use, the least recently used first.
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        # In order of expiry. That is the order of insertion, because all entries have the same time to live.
        self._expiry: OrderedDict[K, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, value: V, size: int) -> bool:
        """Store a value of `size` bytes in place of an older one. False: it is larger than the cache."""
        self.drop(key)
        size += ENTRY_BYTES
        if size > self.capacity:
            return False
        expires = self._clock() + self.ttl_s if self.ttl_s else float("inf")
        self._entries[key] = _Entry(value, size, expires)
        self._expiry[key] = expires
        self.bytes += size
        self.drop_expired()
        while self.bytes > self.capacity:
            self.drop(next(iter(self._entries)))
            self.evictions += 1
        return True

    def find(self, key: K) -> V | None:
        """Return the value and mark it as the most recently used. None if it is missing or expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires <= self._clock():
            self.drop(key)
            self.expirations += 1
            return None
        self._entries.move_to_end(key)
        return entry.value

    def count(self, *, hit: bool) -> None:
        if hit:
            self.hits += 1
        else:
            self.misses += 1

    def drop(self, key: K) -> bool:
        """Remove an entry. Return whether there was one."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        del self._expiry[key]
        self.bytes -= entry.size
        return True

    def drop_expired(self) -> None:
        now = self._clock()
        while self._expiry:
            key, expires = next(iter(self._expiry.items()))
            if expires > now:
                return
            self.drop(key)
            self.expirations += 1

    def clear(self) -> None:
        self._entries.clear()
        self._expiry.clear()
        self.bytes = 0

    def stats(self, prefix: str) -> dict[str, float]:
        """Return the cache's numbers under the names in `observe.table`, which begin with `prefix`."""
        self.drop_expired()
        return {
            f"{prefix}_bytes": self.bytes,
            f"{prefix}_capacity_bytes": self.capacity,
            f"{prefix}_entries": len(self),
            f"{prefix}_hits": self.hits,
            f"{prefix}_misses": self.misses,
            f"{prefix}_evictions": self.evictions,
            f"{prefix}_expired": self.expirations,
        }
