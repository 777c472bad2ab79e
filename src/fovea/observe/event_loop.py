"""An event loop that says when it works: from what its selector finds until it asks again is a span.

All that a thread of asyncio does is in there, parsing of HTTP and writing to sockets included, and nothing of what runs is
changed for it. It is asyncio's own loop, since uvloop has no place to look from.
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
        self._found: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        recorder = active_recorder()
        if recorder is not None and self._found is not None:
            recorder.add(self._name, self._found, recorder.clock())
        found = super().select(timeout)
        recorder = active_recorder()
        self._found = None if recorder is None else recorder.clock()
        return found


def watched_loop(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes a loop whose work is in spans of that name."""
    return lambda: asyncio.SelectorEventLoop(_Selector(name))
