"""The cache of encoded regions of images, bounded in bytes: the least relevant region is evicted first.

A region is named by its pixels, the shape at which it was encoded and, if the tower depends on it, its place
in the image. Its relevance is accumulated over the questions so far: the latest one counts in full, and every
earlier one half as much as the next one. So regions that are relevant for many questions stay longest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fovea.core.ledger import Ledger, LedgerStore

Value = TypeVar("Value")


@dataclass(slots=True)
class _Region(Generic[Value]):
    """An entry of the region cache.

    value: features of the region.
    relevance: accumulated relevance.
    used: number of its latest use; uses are counted over all regions.
    """

    value: Value
    relevance: float
    used: int


class RegionCache(LedgerStore[str, _Region[Value]]):
    """Regions by name. Values are opaque. Not thread-safe."""

    def __init__(
        self, capacity: int, *, ttl_s: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """capacity: ceiling in bytes. ttl_s: regions expire after so many seconds; None: never."""
        self.hits = 0
        self.misses = 0
        self._uses = 0
        super().__init__(
            Ledger(capacity, ttl_s=ttl_s, clock=clock, rank=lambda region: (region.relevance, region.used))
        )

    def __contains__(self, key: str) -> bool:
        return self.peek(key) is not None

    def get(self, key: str, relevance: float) -> Value | None:
        """The features, or None. relevance: the region's relevance for the current question, in [0, 1]."""
        self._ledger.expire()
        region = self._ledger.get(key)
        if region is None:
            self.misses += 1
            return None
        self.hits += 1
        self._uses += 1
        region.relevance, region.used = relevance + region.relevance / 2, self._uses
        return region.value

    def peek(self, key: str) -> Value | None:
        """The features, or None. This does not count as a use."""
        self._ledger.expire()
        region = self._ledger.get(key)
        return None if region is None else region.value

    def put(self, key: str, value: Value, size: int, relevance: float) -> None:
        """Store features of `size` bytes.

        The least relevant region is evicted first, which may be this one; among equally relevant regions, the
        least recently used one. Features larger than the ceiling are not stored, and no other region is
        evicted for them.

        relevance: the region's relevance for the current question, in [0, 1].
        """
        self._ledger.remove(key)
        if size > self.capacity:
            return
        self._uses += 1
        self._ledger.add(key, _Region(value, relevance, self._uses), size)
        self._ledger.expire()
        self._ledger.evict()

    def clear(self) -> None:
        self._ledger.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the bytes add up and are within the ceiling."""
        self._ledger.check_integrity("the region cache")
        if self.bytes > self.capacity:
            raise RuntimeError(f"{self.bytes} bytes of regions are stored, and {self.capacity} are allowed")
