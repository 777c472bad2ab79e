"""Encoded regions of images by content, bounded in bytes: the least relevant leave first.

A region is named by its pixels, the shape it was encoded at, and where in its image it stood, if the tower minds. Its
relevance is what questions made of it so far: the latest counts in full, those before half as much each time. So what
many questions were about stays, and margins go.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(slots=True)
class _Entry(Generic[Value]):
    value: Value
    size: int
    relevance: float
    used: int
    made: float


class RegionCache(Generic[Value]):
    """Values are opaque. For one thread. ttl_s: what was put so many seconds ago is a miss; None: no bound."""

    def __init__(
        self, capacity: int, *, ttl_s: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.capacity = capacity
        self._ttl_s = ttl_s
        self._clock = clock
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._uses = 0
        self._entries: dict[str, _Entry[Value]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return self.peek(key) is not None

    def get(self, key: str, relevance: float) -> Value | None:
        """relevance: of the region to whoever asks, in [0, 1]."""
        self._expire()
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._uses += 1
        entry.relevance, entry.used = relevance + entry.relevance / 2, self._uses
        return entry.value

    def peek(self, key: str) -> Value | None:
        """Without being a use of it."""
        self._expire()
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def put(self, key: str, value: Value, size: int, relevance: float) -> None:
        """Of several equally irrelevant ones, the one that was not used for longest leaves first; it may be this one. What is
        larger than the ceiling is not kept, and costs no other."""
        self._drop(key)
        if size > self.capacity:
            return
        self._uses += 1
        self._entries[key] = _Entry(value, size, relevance, self._uses, self._clock())
        self.bytes += size
        self._expire()
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

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        self.bytes -= 0 if entry is None else entry.size

    def _expire(self) -> None:
        if self._ttl_s is None:
            return
        oldest = self._clock() - self._ttl_s
        for key in [key for key, entry in self._entries.items() if entry.made <= oldest]:
            self._drop(key)

    def _shrink(self) -> None:
        if self.bytes <= self.capacity:
            return
        order = [(entry.relevance, entry.used, key) for key, entry in self._entries.items()]
        heapq.heapify(order)
        while self.bytes > self.capacity:
            _, _, key = heapq.heappop(order)
            self._drop(key)
            self.evictions += 1
