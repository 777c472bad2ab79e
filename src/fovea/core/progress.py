"""How many bytes of a model's weights are loaded, for whoever shows it: /ready, a bar in a terminal.

A process loads one model. Who loads it reports; who shows it asks for the latest report, or watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

MIB = 1 << 20


class Loaded(NamedTuple):
    """Bytes of weights. done: loaded. total: of the whole model."""

    done: int
    total: int

    @property
    def percent(self) -> int:
        """Whole percent; 100 only if all bytes are loaded."""
        return 100 if self.done >= self.total else self.done * 100 // self.total

    def __str__(self) -> str:
        return f"{self.percent}% of its weights ({self.done / MIB:,.0f} of {self.total / MIB:,.0f} MiB)"


_watchers: list[Callable[[Loaded], None]] = []
_latest: Loaded | None = None


def report(done: int, total: int) -> None:
    """Note how far the weights of this process are, and tell all watchers."""
    global _latest
    _latest = Loaded(done, total)
    for watcher in _watchers:
        watcher(_latest)


def latest() -> Loaded | None:
    """Return the latest report of this process; None: there was none."""
    return _latest


@contextmanager
def watch(watcher: Callable[[Loaded], None]) -> Iterator[None]:
    """Call a function with every report while the context lasts, in the thread that reports."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
