"""The values that a process offers from a slab: the memory, its bookkeeping, and the names. Thread-safe."""

from __future__ import annotations

import math
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fovea.engine.transfer.connector import Buffer, copy_pieces, flat_views
from fovea.engine.transfer.slab import Slab

_WRITER = -1
"""Holder of the pins of values that are being copied into the slab."""
OWNER = 0
"""Holder of the pins of this process. Connections are holders from 1."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value in the slab. start: offset; size: bytes; checksum: xxh3_128 in hex; lease: its lease."""

    name: str
    start: int
    size: int
    checksum: str
    lease: int


class OfferedValues:
    """Values in `memory`. A value leaves when its lease ends and nobody reads it."""

    def __init__(self, memory: memoryview, *, lease_s: float, clock: Callable[[], float]) -> None:
        """memory: the slab. lease_s: seconds of a lease or pin. clock: monotonic seconds."""
        self._memory = memory
        self._clock = clock
        self._lock = threading.Lock()
        # A process that starts anew must not confuse its leases with those of its predecessor.
        self._slab = Slab(len(memory), lease_s=lease_s, first_lease=1 + secrets.randbelow(1 << 52))
        self._values: dict[int, Value] = {}
        self._names: Counter[str] = Counter()
        self._expirations = 0
        self._is_closed = False

    def has(self, name: str) -> bool:
        with self._lock:
            self._expire()
            return name in self._names

    def put(self, name: str, pieces: Sequence[Buffer]) -> Value | None:
        """Copy a value into the slab, or return None if there is no room.

        The copy takes its time, so it is made without the lock. The extent is pinned meanwhile: even if this
        process is stopped for longer than a lease, the extent is not reused under the copy.
        """
        views = flat_views(pieces)
        size = sum(len(view) for view in views)
        with self._lock:
            now = self._expire()
            extent = None if self._is_closed else self._slab.take(size, now)
            if extent is None:
                return None
            self._slab.pin(extent.lease, _WRITER, math.inf)
            target = self._memory[extent.start : extent.start + size]
        value = None
        try:
            checksum = copy_pieces(views, target)
            value = Value(name, extent.start, size, checksum, extent.lease)
        finally:
            with self._lock:
                # The term of the lease begins here, unless it ended during the copy.
                if value is not None and self._slab.extend(extent.lease, self._clock()):
                    self._values[extent.lease] = value
                    self._names[name] += 1
                else:
                    value = None
                    self._slab.end(extent.lease)
                self._slab.unpin(_WRITER, extent.lease)
        return value

    def pin(self, lease: int, start: int, size: int, holder: int) -> memoryview | None:
        """Keep a value as it is for up to a lease's time, extend its lease, and return its memory.

        Returns None if the lease has ended, or belongs to a value of another place or size.
        """
        with self._lock:
            now = self._expire()
            value = self._values.get(lease)
            if value is None or (value.start, value.size) != (start, size):
                return None
            self._slab.extend(lease, now)
            self._slab.pin(lease, holder, now + self._slab.lease_s)
            return self._memory[start : start + size]

    def end(self, lease: int, start: int, size: int, holder: int) -> bool:
        """End a lease and the holder's pins of it. Returns False if it had ended, or is another value's."""
        with self._lock:
            self._slab.unpin(holder, lease)
            value = self._values.get(lease)
            if value is None or (value.start, value.size) != (start, size):
                return False
            self._forget(lease)
            return self._slab.end(lease)

    def unpin(self, holder: int) -> None:
        """End all pins of a holder."""
        with self._lock:
            self._slab.unpin(holder)

    def holds_pins(self, holder: int) -> bool:
        with self._lock:
            return self._slab.holds_pins(holder)

    def expire(self) -> None:
        """End leases and pins whose time is over."""
        with self._lock:
            self._expire()

    def close(self) -> None:
        """End all leases and let the memory go. Nothing is stored any more."""
        with self._lock:
            self._is_closed = True
            self._memory = memoryview(b"")
            for lease in list(self._values):
                self._slab.end(lease)
                self._forget(lease)

    def stats(self) -> dict[str, float]:
        """slab_bytes, free_bytes; leases: extents in use; expirations: leases that ended by time."""
        with self._lock:
            self._expire()
            return {
                "slab_bytes": float(self._slab.size),
                "free_bytes": float(self._slab.free_bytes),
                "leases": float(self._slab.leases),
                "expirations": float(self._expirations),
            }

    def _expire(self) -> float:
        """Return the time, after all leases that end by then have ended."""
        now = self._clock()
        for lease in self._slab.expire(now):
            if lease in self._values:
                self._forget(lease)
                self._expirations += 1
        return now

    def _forget(self, lease: int) -> None:
        name = self._values.pop(lease).name
        self._names[name] -= 1
        if not self._names[name]:
            del self._names[name]
