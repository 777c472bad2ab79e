"""The changes of a cache that were not announced yet, as their net effect, so that their memory is bounded.

The engine's thread notes every change, and another thread takes them all now and then. What was stored and
removed in between leaves no trace. So the changes are never more than the entries that the cache had when
they were last taken, and those that it has now, however slow the other thread is: nothing is lost, and the
engine never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

DEVICE, HOST = "GPU", "CPU"
"""Names of media in events: the device's memory (also of engines on CPUs); host memory beside it."""
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class StoredBlock(NamedTuple):
    """A full block of keys and values.

    parent: name of the block before; None: it is the first one of a prompt.
    tokens: its token ids.
    keys: for each image that it touches, its name, and the position of its first token minus that of the
        block's first one; in a first block also the cache salt.
    """

    parent: bytes | None
    tokens: tuple[int, ...]
    keys: tuple[tuple[str, int] | str, ...]


class StoredOutput(NamedTuple):
    """An encoder output. size: bytes."""

    size: int


class Net(NamedTuple, Generic[K, V]):
    """The net effect of changes, in the order in which it is to be told.

    cleared: whether everything was removed at first.
    stored: entries that are new in the cache, in the order in which they came.
    removed: keys that are no longer in it. They come last: a router finds a stored block by its parent, which
        may be removed meanwhile.
    """

    cleared: bool
    stored: dict[K, V]
    removed: list[K]

    def __bool__(self) -> bool:
        return bool(self.cleared or self.removed or self.stored)


class Changes(Generic[K, V]):
    """Changes of a cache since they were last taken. Thread-safe.

    on_change: called without arguments when the first change after `take` is noted, by the thread that
        notes it. It must not block.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self.on_change = on_change
        self._lock = threading.Lock()
        self._known: set[K] = set()
        self._pending: dict[K, V | None] = {}  # None: removed
        self._cleared = False

    def store(self, entries: Iterable[tuple[K, V]]) -> None:
        """Note that entries were stored. One that is there already does not count again."""
        known, changed = self._known, False
        with self._lock:
            first = self._unchanged
            for key, value in entries:
                if key not in known:
                    known.add(key)
                    changed = True
                    if key in self._pending:
                        del self._pending[key]  # it was removed and is back
                    else:
                        self._pending[key] = value
        if first and changed:
            self.on_change()

    def remove(self, key: K) -> None:
        """Note that an entry was removed. One that was never stored does not count."""
        with self._lock:
            if key not in self._known:
                return
            self._known.remove(key)
            first = self._unchanged
            if key in self._pending:
                del self._pending[key]  # nobody was told that it came
            else:
                self._pending[key] = None
        if first:
            self.on_change()

    def clear(self) -> None:
        """Note that all entries were removed."""
        with self._lock:
            first = self._unchanged
            self._known.clear()
            self._pending.clear()
            self._cleared = True
        if first:
            self.on_change()

    def take(self) -> Net[K, V]:
        """Return and forget all changes."""
        with self._lock:
            pending, self._pending = self._pending, {}
            cleared, self._cleared = self._cleared, False
        removed = [key for key, value in pending.items() if value is None]
        stored = {key: value for key, value in pending.items() if value is not None}
        return Net(cleared, stored, removed)

    @property
    def _unchanged(self) -> bool:
        return not self._pending and not self._cleared


BlockChanges = Changes[tuple[str, bytes], StoredBlock]
"""Changes of blocks, by medium and name."""
OutputChanges = Changes[tuple[str, str], StoredOutput]
"""Changes of encoder outputs, by medium and key."""


def watch_outputs(changes: OutputChanges | None, medium: str) -> Callable[[str, int | None], None] | None:
    """Return a function for `watch` of a `Ledger`, which notes its changes; None: nobody wants them."""
    if changes is None:
        return None

    def watch(key: str, size: int | None) -> None:
        if size is None:
            changes.remove((medium, key))
        else:
            changes.store([((medium, key), StoredOutput(size))])

    return watch
