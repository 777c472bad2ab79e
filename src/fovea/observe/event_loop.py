"""An event loop that records when it works: a span lasts from one return of its selector to the next call.

The spans contain all work of an asyncio thread, including parsing of HTTP and writing to sockets, without
changes to the code that runs. It is asyncio's own loop, because uvloop offers no place for the measurement.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable

from fovea.core.stage import active_recorder


class _Selector(selectors.DefaultSelector):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._awake_since: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        recorder = active_recorder()
        if recorder is not None and self._awake_since is not None:
            recorder.add(self._name, self._awake_since, recorder.clock())
        events = super().select(timeout)
        recorder = active_recorder()
        self._awake_since = None if recorder is None else recorder.clock()
        return events


def watched_loop(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return a factory of event loops whose work is recorded in spans of that name."""
    return lambda: asyncio.SelectorEventLoop(_Selector(name))
