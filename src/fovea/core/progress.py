"""How many bytes of a model's weights are loaded, for whoever shows it: /ready, a bar in a terminal.

Who loads it reports; who shows it asks for the latest report, or watches. A server with several engines loads
them in as many threads, and shows their sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

MIB = 1 << 20


class Loaded(NamedTuple):
    """Bytes of weights. done: loaded. total: of the whole model, or of all engines' models."""

    done: int
    total: int

    @property
    def percent(self) -> int:
        """Whole percent; 100 only if all bytes are loaded."""
        return 100 if self.done >= self.total else self.done * 100 // self.total

    def __str__(self) -> str:
        return f"{self.percent}% of its weights ({self.done / MIB:,.0f} of {self.total / MIB:,.0f} MiB)"


_lock = threading.Lock()
_watchers: list[Callable[[Loaded], None]] = []
_latest: Loaded | None = None
_parts: dict[int, Loaded] = {}
"""What each thread loads, until all of it is loaded."""


def report(done: int, total: int) -> None:
    """Note how far the weights are that this thread loads, and tell all watchers, one report at a time."""
    global _latest
    with _lock:
        _parts[threading.get_ident()] = Loaded(done, total)
        _latest = Loaded(*map(sum, zip(*_parts.values(), strict=True)))
        if _latest.percent == 100:
            _parts.clear()
        for watcher in _watchers:
            watcher(_latest)


def latest() -> Loaded | None:
    """Return the latest report of this process; None: there was none."""
    return _latest


@contextmanager
def watch(watcher: Callable[[Loaded], None]) -> Iterator[None]:
    """Call a function with every report while the context lasts, in the thread that reports.

    At the end, it waits for the call that runs.
    """
    with _lock:
        _watchers.append(watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)
