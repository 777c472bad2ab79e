"""The order in which a server ends.

    SERVING    until a signal arrives or the engine dies
    DRAINING   the port is open and new requests get 503; running requests have `drain_s` seconds. It lasts at
               least `lame_duck_s` seconds, in which load balancers notice it
    CUTTING    running requests get an error, streams as their last event; the port stays open for the rest of
               `lame_duck_s`
    ENDED      the port closes

It reads no clock.
"""

from __future__ import annotations

import math
from enum import IntEnum

CUT_S = 3.0
"""Seconds in which errors reach their clients; afterwards the tasks of their requests are cancelled."""


class Stage(IntEnum):
    """The stages of a server's life."""

    SERVING = 0
    DRAINING = 1
    CUTTING = 2
    ENDED = 3


class Drain:
    """The stage of one server.

    stage: changes only in `begin` and `advance`.
    """

    def __init__(self) -> None:
        self.stage = Stage.SERVING
        self._lame_end = math.inf
        self._drain_end = math.inf
        self._cut_end = math.inf

    def begin(self, now: float, drain_s: float, lame_duck_s: float) -> None:
        """Start to drain. A later call has no effect."""
        if self.stage is Stage.SERVING:
            self.stage = Stage.DRAINING
            self._drain_end = now + drain_s
            self._lame_end = now + lame_duck_s

    def hurry(self, now: float) -> None:
        """Let all that remains end now, with errors for running requests."""
        if self.stage is not Stage.SERVING:
            self._drain_end = min(self._drain_end, now)
            self._lame_end = min(self._lame_end, now)

    def advance(self, now: float, running: int) -> Stage:
        """Return the stage at a time.

        running: requests that are being answered.
        """
        if self.stage is Stage.DRAINING and running and now >= self._drain_end:
            self.stage = Stage.CUTTING
            self._cut_end = now + CUT_S
        over = self.stage in (Stage.DRAINING, Stage.CUTTING) and now >= self._lame_end
        if over and (not running or now >= self._cut_end):
            self.stage = Stage.ENDED
        return self.stage
