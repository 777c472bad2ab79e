"""Flow control of one connection, and the time that a slow client has used up.

A body may take `body_s` seconds and one more for each `rate` bytes that have arrived. The time in which the
server does not read is not the client's. An answer may wait `write_s` seconds for its client and one more
for each `rate` bytes that have left. Only the time counts in which the write buffer is over its limit.
"""

from __future__ import annotations

import asyncio
import math
import time

from uvicorn.protocols.http.flow_control import FlowControl

from fovea.server.http.rules import Rules
from fovea.server.http.table import Entry


class Flow(FlowControl):
    """Pauses reading and writing as uvicorn's flow control does, and keeps the times.

    body_bytes: bytes of the current body that have arrived.
    sent: bytes of the current answer that were handed to the transport.
    """

    def __init__(self, transport: asyncio.Transport, entry: Entry, rules: Rules) -> None:
        super().__init__(transport)
        self.body_bytes = 0
        self.sent = 0
        self._entry = entry
        self._rules = rules
        self._body_began = 0.0
        self._paused_at = 0.0
        self._stalled_at = 0.0
        self._stalled_s = 0.0

    def begin_body(self, now: float) -> float:
        """Start the clock of a body, and return its first deadline."""
        self._body_began = now
        return now + self._rules.body_s

    def body_deadline(self, now: float, *, waiting: bool = False) -> float:
        """Return the time until which the body has to be there, by what has arrived so far.

        waiting: whether the client waits for a sign that it may send; this time is not its own.
        """
        if self.read_paused or waiting:
            return self.begin_body(now)
        return self._body_began + self._rules.body_s + self.body_bytes / self._rules.rate

    def write_deadline(self, now: float) -> float:
        """Return the time until which the client has to read more of the answer; infinite: it reads."""
        if not self.write_paused:
            return math.inf
        left_server = max(0, self.sent - self._transport.get_write_buffer_size())
        allowed = self._rules.write_s + left_server / self._rules.rate
        return self._stalled_at + allowed - self._stalled_s

    def begin_answer(self) -> None:
        """Forget the times of the last answer."""
        self.sent = 0
        self._stalled_s = 0.0
        if self.write_paused:
            self._stalled_at = time.monotonic()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._paused_at = time.monotonic()
            self._entry.unread = True
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self._body_began += time.monotonic() - self._paused_at
            self._entry.unread = False
        super().resume_reading()

    def pause_writing(self) -> None:
        if not self.write_paused:
            super().pause_writing()
            self._stalled_at = now = time.monotonic()
            self._entry.write_deadline = self.write_deadline(now)

    def resume_writing(self) -> None:
        if self.write_paused:
            self._stalled_s += time.monotonic() - self._stalled_at
            self._entry.write_deadline = math.inf
        super().resume_writing()
