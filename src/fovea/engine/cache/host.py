"""What faster memory had no room for, bounded in bytes: the tier between the device and the disk.

Values are opaque. Room is made before a value is copied here, so the ceiling holds while it is copied, too. What is read
stays, and is not copied again when it is evicted from faster memory the next time. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class _Entry(NamedTuple, Generic[Value]):
    value: Value
    size: int
    made: float


@dataclass(slots=True)
class HostStats:
    """bytes: of entries and of what is being copied here. dropped: values too large or too old to be kept."""

    bytes: int = 0
    entries: int = 0
    hits: int = 0
    misses: int = 0
    dropped: int = 0
    evictions: int = 0
    expired: int = 0


class HostStore(Generic[Value]):
    """At most `capacity` bytes, least recently used first out, nothing made more than `ttl_s` seconds ago."""

    def __init__(
        self, capacity: int, *, ttl_s: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.capacity = capacity
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._stats = HostStats()
        self._entries: OrderedDict[str, _Entry[Value]] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and not self._is_stale(entry.made)

    def get(self, key: str) -> Value | None:
        """The value, marked as used, or None."""
        with self._lock:
            self._expire()
            entry = self._entries.get(key)
            if entry is None:
                self._stats.misses += 1
                return None
            self._stats.hits += 1
            self._entries.move_to_end(key)
            return entry.value

    def put(self, key: str, size: int, made: float, copy: Callable[[], Value]) -> bool:
        """Keep what `copy` makes, `size` bytes; nothing is copied if `key` is here already. False: there is no place."""
        if not self._reserve(key, size, made):
            return key in self
        try:
            value = copy()
        except BaseException:
            with self._lock:
                self._stats.bytes -= size
            raise
        with self._lock:
            if key in self._entries:
                self._remove(key)
            self._entries[key] = _Entry(value, size, made)
            self._stats.entries += 1
            return True

    def drop(self, key: str) -> None:
        with self._lock:
            if key in self._entries:
                self._remove(key)

    def clear(self) -> None:
        with self._lock:
            for key in list(self._entries):
                self._remove(key)

    def sweep(self) -> None:
        """Remove what is too old."""
        with self._lock:
            self._expire()

    def stats(self) -> HostStats:
        with self._lock:
            return replace(self._stats)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the bytes add up. For a moment in which nothing is copied here."""
        with self._lock:
            total = sum(entry.size for entry in self._entries.values())
            if (self._stats.bytes, self._stats.entries) != (total, len(self._entries)):
                raise RuntimeError("the host tier of encoder outputs lost count of its bytes")

    def _reserve(self, key: str, size: int, made: float) -> bool:
        """Make room and take it. False where nothing has to be copied."""
        with self._lock:
            self._expire()
            if key in self._entries:
                self._entries.move_to_end(key)
                return False
            if size > self.capacity or self._is_stale(made):
                self._stats.dropped += 1
                return False
            # What is being copied by others cannot be removed: then there may be no place after all.
            while self._entries and self._stats.bytes + size > self.capacity:
                self._remove(next(iter(self._entries)))
                self._stats.evictions += 1
            if self._stats.bytes + size > self.capacity:
                self._stats.dropped += 1
                return False
            self._stats.bytes += size
            return True

    def _is_stale(self, made: float) -> bool:
        return self._ttl_s is not None and self._clock() - made >= self._ttl_s

    def _expire(self) -> None:
        if self._ttl_s is None:
            return
        for key in [key for key, entry in self._entries.items() if self._is_stale(entry.made)]:
            self._remove(key)
            self._stats.expired += 1

    def _remove(self, key: str) -> None:
        self._stats.bytes -= self._entries.pop(key).size
        self._stats.entries -= 1
