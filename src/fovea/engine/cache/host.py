"""A store of encoder outputs in host memory, bounded in bytes: the tier between the device and the disk.

Values are opaque. Room is made before a value is copied to the store, so the ceiling also holds during the
copy. A value stays after it is read, so it needs no further copy when it is evicted from the device again.
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

    bytes: bytes of all values, and of those that are being copied to the store.
    entries: values.
    hits, misses: reads.
    drops: values that were not stored, because they were too large or too old, or there was no room.
    evictions: values removed for lack of room.
    expirations: values removed because of their age.
    """

    bytes: int = 0
    entries: int = 0
    hits: int = 0
    misses: int = 0
    drops: int = 0
    evictions: int = 0
    expirations: int = 0


class HostStore(Generic[Value]):
    """Values by key. The least recently used value is evicted first. Thread-safe."""

    def __init__(
        self, capacity: int, *, ttl_s: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """capacity: ceiling in bytes. ttl_s: values expire after so many seconds; None: never."""
        self._ledger: Ledger[str, Value] = Ledger(capacity, ttl_s=ttl_s, clock=clock)
        self._lock = threading.Lock()
        self._hits = 0
        self._misses = 0
        self._drops = 0

    def divide(self, owner_of: Callable[[str, object], str], share_of: Callable[[str], float]) -> None:
        """Bound the values of every owner by its share of the capacity.

        The arguments are those of `core.owners.Owners`.
        """
        with self._lock:
            self._ledger.divide(owner_of, share_of)

    @property
    def capacity(self) -> int:
        return self._ledger.capacity

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return self._ledger.fresh(key) is not None

    def get(self, key: str) -> Value | None:
        """The value, or None. The value is marked as used."""
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
        """Store the value that `copy` returns. If there is an entry for the key already, nothing is copied.

        size: bytes of the value.
        created: time when the value was computed.

        Returns False if the value is not stored.
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
            self._ledger.evict_over_share(key)
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
                drops=self._drops,
                evictions=ledger.evictions,
                expirations=ledger.expirations,
            )

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the bytes add up."""
        with self._lock:
            self._ledger.check_integrity("the host tier of encoder outputs")

    def _reserve(self, key: str, size: int, created: float) -> bool:
        """Make room for a value and count its bytes. Returns False if it must not be copied."""
        with self._lock:
            self._ledger.expire()
            if key in self._ledger:
                self._ledger.touch(key)
                return False
            if size > self.capacity or self._ledger.is_stale(created):
                self._drops += 1
                return False
            # Bytes that other threads have reserved cannot be evicted, so there may be no room after all.
            self._ledger.evict(self.capacity - size)
            if self._ledger.bytes + size > self.capacity:
                self._drops += 1
                return False
            self._ledger.reserve(size)
            return True
