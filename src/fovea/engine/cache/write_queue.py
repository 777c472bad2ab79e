"""Writes that wait for slower memory: one daemon thread, a queue bounded in bytes, the newest value of a key only.

What waits or is being written is still found by `pending`, so a reader never has a moment between memory and disk in
which a value is nowhere.
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
    @property
    def nbytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class WriteQueue(Generic[Value]):
    """Calls `write(key, value)` for what is submitted, and `tick()` at the start and after `every_s` of silence.

    name: of the thread, and in the log.
    """

    def __init__(
        self,
        write: Callable[[str, Value], None],
        tick: Callable[[], None],
        *,
        name: str,
        limit: int,
        every_s: float,
    ) -> None:
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
        """Waiting and being written."""
        with self._changed:
            return self._bytes

    def submit(self, key: str, value: Value) -> bool:
        """Queue a write in place of an older one of `key`. False: the queue is full or closed."""
        with self._changed:
            old = self._queue.get(key)
            total = self._bytes + value.nbytes - (old.nbytes if old is not None else 0)
            if self._closing or total > self._limit:
                # The older value must not win later over a newer one that was refused.
                self._forget(key)
                return False
            self._queue[key] = value
            self._bytes = total
            self._changed.notify_all()
            return True

    def pending(self, key: str) -> Value | None:
        with self._changed:
            if key in self._queue:
                return self._queue[key]
            return self._current[1] if self._current is not None and self._current[0] == key else None

    def cancel(self, key: str) -> None:
        """Forget what waits for `key`; returns when nothing of it is being written either."""
        with self._changed:
            self._forget(key)
            self._changed.wait_for(lambda: self._current is None or self._current[0] != key)

    def cancel_all(self) -> None:
        self.discard()
        with self._changed:
            self._changed.wait_for(lambda: self._current is None)

    def discard(self) -> int:
        """Forget all that waits, without waiting for the write that runs; how many they were."""
        with self._changed:
            count = len(self._queue)
            for key in list(self._queue):
                self._forget(key)
            self._changed.notify_all()
            return count

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all is written. False: it was not within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle and not self._queue, timeout)

    def close(self, timeout: float | None = None) -> int:
        """Take no more, write what waits for up to `timeout` seconds; how many writes were given up."""
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
        self._guarded(self._tick)
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
                self._guarded(self._tick)
                continue
            self._guarded(partial(self._write, *current))
            with self._changed:
                self._bytes -= current[1].nbytes
                self._current = None
                self._changed.notify_all()

    def _guarded(self, work: Callable[[], None]) -> None:
        """A defect costs one write, not the thread and with it every later one."""
        try:
            work()
        except Exception:
            log.exception("a write of %s failed unexpectedly", self._name)
