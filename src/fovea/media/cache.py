"""A least-recently-used cache for uploads, downloads and decoded images: bounded in bytes and in age."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TypeVar

from fovea.core.ledger import Ledger, LedgerStore

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 512
"""Estimated bytes of an entry beside its value, so that a million tiny values do not exceed the ceiling."""


class ByteCache(LedgerStore[K, V]):
    """A mapping that evicts its least recently used values if room is short, and drops values that are old.

    Not thread-safe: use it from one thread, for example the event loop's.

    hits, misses: counted by the caller with `count`: only the caller knows whether an entry was usable.
    """

    def __init__(
        self, capacity: int, ttl_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """capacity: ceiling in bytes, each entry with ENTRY_BYTES; 0 stores nothing.

        ttl_s: seconds for which a value is stored after it was put; 0: no limit.
        """
        self.ttl_s = ttl_s
        self.hits = 0
        self.misses = 0
        super().__init__(Ledger(capacity, ttl_s=ttl_s or None, clock=clock))

    def divide(self, owner_of: Callable[[K, V], str], share_of: Callable[[str], float]) -> None:
        """Bound the bytes of every owner's entries. One over its share evicts its own oldest entries first.

        owner_of: returns the owner of an entry by its key and value.
        share_of: returns the part of the capacity that an owner may fill, from 0 to 1.
        """
        self._ledger.divide(owner_of, share_of)

    def put(self, key: K, value: V, size: int) -> bool:
        """Store a value of `size` bytes in place of an older one.

        False: it is larger than the cache, or than its owner's share of it.
        """
        self._ledger.remove(key)
        size += ENTRY_BYTES
        if size > self.capacity or not self._ledger.fits_share(key, value, size):
            return False
        self._ledger.add(key, value, size)
        self._ledger.expire()
        self._ledger.evict_over_share(key)
        self._ledger.evict()
        return True

    def find(self, key: K) -> V | None:
        """Return the value and mark it as the most recently used. None if it is missing or expired."""
        self._ledger.expire()
        value = self._ledger.get(key)
        if value is not None:
            self._ledger.touch(key)
        return value

    def count(self, *, hit: bool) -> None:
        if hit:
            self.hits += 1
        else:
            self.misses += 1

    def drop(self, key: K) -> bool:
        """Remove an entry. Return whether there was one."""
        return self._ledger.remove(key) is not None

    def clear(self) -> None:
        self._ledger.clear()

    def stats(self, prefix: str) -> dict[str, float]:
        """Return the cache's numbers under the names in `observe.table`, which begin with `prefix`."""
        self._ledger.expire()
        return {
            f"{prefix}_bytes": self.bytes,
            f"{prefix}_capacity_bytes": self.capacity,
            f"{prefix}_entries": len(self),
            f"{prefix}_hits": self.hits,
            f"{prefix}_misses": self.misses,
            f"{prefix}_evictions": self.evictions,
            f"{prefix}_expired": self.expirations,
        }
