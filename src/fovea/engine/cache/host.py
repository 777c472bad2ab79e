"""A store of encoder outputs in host memory, bounded in bytes, and the queue of writes to slower memory.

Values are opaque. Room is made before a value is copied to the store, so the ceiling also holds during the
copy. A value stays after it is read, so it needs no further copy when it is evicted from the device again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from fovea.core.ledger import Ledger

log = logging.getLogger("fovea.engine")
Value = TypeVar("Value")


class HostStore(Generic[Value]):
    """Values by key. The least recently used value is evicted first. Thread-safe."""

    def __init__(
        self,
        capacity: int,
        *,
        ttl_s: float | None = None,
        watch: Callable[[str, int | None], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """capacity: ceiling in bytes. ttl_s: values expire after so many seconds; None: never.

        watch: called for every value that comes or goes, see `Ledger`.
        """
        self._ledger: Ledger[str, Value] = Ledger(capacity, ttl_s=ttl_s, clock=clock, watch=watch)
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


class Sized(Protocol):
    """A value that knows its size in bytes."""

    @property
    def nbytes(self) -> int: ...


Item = TypeVar("Item", bound=Sized)


class WriteQueue(Generic[Item]):
    """Calls `write(key, value)` for every submitted value, in its own thread. Thread-safe.

    It is bounded in bytes, and has only the newest value of each key.

    `pending_value` finds a value while it waits and while it is being written. So a reader can find a
    value at any time between memory and disk.
    """

    def __init__(
        self,
        write: Callable[[str, Item], None],
        tick: Callable[[], None],
        *,
        name: str,
        limit: int,
        every_s: float,
    ) -> None:
        """tick: called when the thread starts, and after every `every_s` seconds without a write.

        name: name of the thread, also in the log.
        limit: ceiling of waiting values, in bytes. A single value may exceed it.
        """
        self._write = write
        self._tick = tick
        self._limit = limit
        self._every = every_s
        self._changed = threading.Condition()
        self._queue: OrderedDict[str, Item] = OrderedDict()
        self._current: tuple[str, Item] | None = None
        self._bytes = 0
        self._name = name
        self._idle = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def bytes(self) -> int:
        """Bytes of the values that wait or are being written."""
        with self._changed:
            return self._bytes

    def submit(self, key: str, value: Item) -> bool:
        """Queue a write; it replaces a waiting value of the same key.

        Returns False if the queue is full or closed.
        """
        with self._changed:
            old = self._queue.get(key)
            others = self._bytes - (old.nbytes if old is not None else 0)
            total = others + value.nbytes
            if self._closing or (others and total > self._limit):
                # The older value must not be written after a newer one was refused.
                self._forget(key)
                return False
            self._queue[key] = value
            self._bytes = total
            self._changed.notify_all()
            return True

    def pending_value(self, key: str) -> Item | None:
        """The value of `key` that waits or is being written, or None."""
        with self._changed:
            if key in self._queue:
                return self._queue[key]
            return self._current[1] if self._current is not None and self._current[0] == key else None

    def cancel(self, key: str) -> None:
        """Discard the waiting value of `key`. If one is being written, wait until that has ended."""
        with self._changed:
            self._forget(key)
            self._changed.wait_for(lambda: self._current is None or self._current[0] != key)

    def cancel_all(self) -> None:
        """Discard all waiting values, and wait until the current write has ended."""
        self.discard()
        with self._changed:
            self._changed.wait_for(lambda: self._current is None)

    def discard(self) -> int:
        """Discard all waiting values without waiting for the current write. Returns their number."""
        with self._changed:
            count = len(self._queue)
            for key in list(self._queue):
                self._forget(key)
            self._changed.notify_all()
            return count

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all values are written. Returns False if that takes more than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle and not self._queue, timeout)

    def close(self, timeout: float | None = None) -> int:
        """Refuse new values, and write waiting ones for up to `timeout` seconds.

        Returns the number of discarded ones.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return self.discard()

    def _forget(self, key: str) -> None:
        old = self._queue.pop(key, None)
        if old is not None:
            self._bytes -= old.nbytes

    def _run(self) -> None:
        self._run_guarded(self._tick)
        while True:
            with self._changed:
                self._idle = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closing, self._every)
                if self._closing and not self._queue:
                    return
                self._idle = False
                if self._queue:
                    self._current = self._queue.popitem(last=False)
                current = self._current
            if current is None:
                self._run_guarded(self._tick)
                continue
            self._run_guarded(partial(self._write, *current))
            with self._changed:
                self._bytes -= current[1].nbytes
                self._current = None
                self._changed.notify_all()

    def _run_guarded(self, work: Callable[[], None]) -> None:
        """Run and log any exception. So a defect fails one write, and the thread goes on."""
        try:
            work()
        except Exception:
            log.exception("a write of %s failed unexpectedly", self._name)
