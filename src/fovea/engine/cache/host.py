"""Encoder outputs in host memory, bounded in bytes: the tier between the device and the disk.

Values are opaque. Room is made before a value is copied here, so the ceiling holds during the copy. A value that is read
stays, and is not copied again when it is evicted from the device the next time. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fovea.core.ledger import Ledger

Value = TypeVar("Value")


@dataclass(slots=True)
class HostStats:
    """Counters of a host store.

    bytes: of all entries, and of values that are being copied here.
    dropped: values that were too large or too old to be stored.
    """

    bytes: int = 0
    entries: int = 0
    hits: int = 0
    misses: int = 0
    dropped: int = 0
    evictions: int = 0
    expired: int = 0


class HostStore(Generic[Value]):
    """At most `capacity` bytes; the least recently used value is evicted first, and values expire after `ttl_s` seconds."""

    def __init__(
        self, capacity: int, *, ttl_s: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._ledger: Ledger[str, Value] = Ledger(capacity, ttl_s=ttl_s, clock=clock)
        self._lock = threading.Lock()
        self._hits = 0
        self._misses = 0
        self._dropped = 0

    @property
    def capacity(self) -> int:
        return self._ledger.capacity

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return self._ledger.fresh(key) is not None

    def get(self, key: str) -> Value | None:
        """The value, marked as used, or None."""
        with self._lock:
            self._ledger.expire()
            value = self._ledger.get(key)
            if value is None:
                self._misses += 1
                return None
            self._hits += 1
            self._ledger.touch(key)
            return value

    def put(self, key: str, size: int, created: float, copy: Callable[[], Value]) -> bool:
        """Store the value that `copy` returns, of `size` bytes. If the key is here already, nothing is copied.

        created: when the value was made. False: there is no room.
        """
        if not self._reserve(key, size, created):
            return key in self
        try:
            value = copy()
        except BaseException:
            with self._lock:
                self._ledger.unreserve(size)
            raise
        with self._lock:
            self._ledger.unreserve(size)
            self._ledger.add(key, value, size, created)
            return True

    def drop(self, key: str) -> None:
        with self._lock:
            self._ledger.remove(key)

    def clear(self) -> None:
        with self._lock:
            self._ledger.clear()

    def sweep(self) -> None:
        """Remove expired values."""
        with self._lock:
            self._ledger.expire()

    def stats(self) -> HostStats:
        with self._lock:
            ledger = self._ledger
            return HostStats(
                bytes=ledger.bytes,
                entries=len(ledger),
                hits=self._hits,
                misses=self._misses,
                dropped=self._dropped,
                evictions=ledger.evictions,
                expired=ledger.expirations,
            )

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the bytes add up."""
        with self._lock:
            self._ledger.check_integrity("the host tier of encoder outputs")

    def _reserve(self, key: str, size: int, created: float) -> bool:
        """Make room for a value and count its bytes. False: nothing has to be copied."""
        with self._lock:
            self._ledger.expire()
            if key in self._ledger:
                self._ledger.touch(key)
                return False
            if size > self.capacity or self._ledger.is_stale(created):
                self._dropped += 1
                return False
            # Bytes that other threads have reserved cannot be evicted, so there may be no room after all.
            self._ledger.evict(self.capacity - size)
            if self._ledger.bytes + size > self.capacity:
                self._dropped += 1
                return False
            self._ledger.reserve(size)
            return True
