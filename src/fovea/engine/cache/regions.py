"""Encoded regions of images by content, bounded in bytes: the least relevant leave first.

A region is named by its pixels, the shape it was encoded at, and where in its image it stood, if the tower minds. Its
relevance is what questions made of it so far: the latest counts in full, those before half as much each time. So what
many questions were about stays, and margins go.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(slots=True)
class _Entry(Generic[Value]):
    value: Value
    size: int
    relevance: float
    used: int


class RegionCache(Generic[Value]):
    """Values are opaque. For one thread."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._uses = 0
        self._entries: dict[str, _Entry[Value]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def get(self, key: str, relevance: float) -> Value | None:
        """relevance: of the region to whoever asks, in [0, 1]."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._uses += 1
        entry.relevance, entry.used = relevance + entry.relevance / 2, self._uses
        return entry.value

    def put(self, key: str, value: Value, size: int, relevance: float) -> None:
        """Of several equally irrelevant ones, the one that was not used for longest leaves first; it may be this one."""
        old = self._entries.pop(key, None)
        self.bytes -= old.size if old is not None else 0
        self._uses += 1
        self._entries[key] = _Entry(value, size, relevance, self._uses)
        self.bytes += size
        self._shrink()

    def clear(self) -> None:
        self._entries.clear()
        self.bytes = 0

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the bytes add up and are within the ceiling."""
        if self.bytes != sum(entry.size for entry in self._entries.values()):
            raise RuntimeError("the region cache lost count of its bytes")
        if self.bytes > self.capacity:
            raise RuntimeError(f"{self.bytes} bytes of regions kept, {self.capacity} allowed")

    def _shrink(self) -> None:
        if self.bytes <= self.capacity:
            return
        order = [(entry.relevance, entry.used, key) for key, entry in self._entries.items()]
        heapq.heapify(order)
        while self.bytes > self.capacity:
            _, _, key = heapq.heappop(order)
            self.bytes -= self._entries.pop(key).size
            self.evictions += 1
