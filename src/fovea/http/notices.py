"""Log lines about what clients do, at most one of each kind in ten seconds.

A stranger decides how often a malformed request arrives. Without a limit, the log would grow at the speed of
the network.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("fovea.server")
PERIOD_S = 10.0


class Notices:
    """Writes warnings, and counts those that it leaves out.

    clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, kind: str, message: str) -> None:
        """Log a message, unless one of this kind was logged within the last ten seconds.

        kind: a word of the code, never of a client: every kind is remembered.
        """
        now = self._clock()
        if now < self._next.get(kind, 0.0):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._next[kind] = now + PERIOD_S
        more = self._left_out.pop(kind, 0)
        log.warning("%s%s", message, f" (and {more} more of this kind before)" if more else "")
