"""A queue of writes to slower memory, with one daemon thread.

It is bounded in bytes, and has only the newest value of each key.

`pending_value` finds a value while it waits and while it is being written. So a reader can find a value at
any time between memory and disk.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

log = logging.getLogger("fovea.engine")


class Sized(Protocol):
    """A value that knows its size in bytes."""

    @property
    def nbytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class WriteQueue(Generic[Value]):
    """Calls `write(key, value)` for every submitted value, in its own thread. Thread-safe."""

    def __init__(
        self,
        write: Callable[[str, Value], None],
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
        self._queue: OrderedDict[str, Value] = OrderedDict()
        self._current: tuple[str, Value] | None = None
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

    def submit(self, key: str, value: Value) -> bool:
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

    def pending_value(self, key: str) -> Value | None:
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
