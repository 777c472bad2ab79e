"""Flow control of one connection, and the patience with a slow client.

A client has some seconds of patience. Waiting for it uses them up; every `rate` bytes that it transfers give
one second back, up to the limit. So a client may be silent for that long, and in the long run it has to be as
fast as the least rate. The time in which the server does not read is not counted. Answers are counted
only while the write buffer is over its limit.
"""

from __future__ import annotations

import asyncio
import math
import time

from uvicorn.protocols.http.flow_control import FlowControl

from fovea.http.rules import Rules
from fovea.http.sockets import unacknowledged_bytes
from fovea.http.table import Entry

DROPPED_BYTES = 256 * 1024
"""Bytes that are read and dropped after a refusal; the client's system keeps the rest."""


class Patience:
    """The seconds that a client has left.

    limit_s: the seconds at the start, and the most that there ever are.
    rate: bytes that give one second back.
    """

    __slots__ = ("_at", "_bytes", "_left_s", "_limit_s", "_rate")

    def __init__(self, limit_s: float, rate: float) -> None:
        self._limit_s = limit_s
        self._rate = rate
        self._left_s = limit_s
        self._at = 0.0
        self._bytes = 0

    def renew(self) -> None:
        """Give all seconds back."""
        self._left_s = self._limit_s

    def resume(self, now: float, transferred: int) -> float:
        """Begin to wait, and return the time until which the client has to do something.

        transferred: bytes that the client has sent, or has read, until now.
        """
        self._at = now
        self._bytes = transferred
        return now + self._left_s

    def skip(self, seconds: float) -> None:
        """Do not charge some of the time since the last call."""
        self._at += seconds

    def charge(self, now: float, transferred: int) -> float:
        """Charge the time since the last call, credit the bytes since then, and return the new deadline."""
        credit = (transferred - self._bytes) / self._rate
        self._left_s = min(self._limit_s, self._left_s - (now - self._at) + credit)
        return self.resume(now, transferred)


class Flow(FlowControl):
    """Pauses reading and writing as uvicorn's flow control does, and measures both.

    sent: bytes that were handed to the transport.
    """

    def __init__(self, transport: asyncio.Transport, entry: Entry, rules: Rules) -> None:
        super().__init__(transport)
        self.sent = 0
        self._entry = entry
        self._reading = Patience(rules.body_s, rules.rate)
        self._writing = Patience(rules.write_s, rules.rate)
        self._paused_at = 0.0
        self._dropped = 0
        self._socket = transport.get_extra_info("socket")

    def drop(self, size: int) -> bool:
        """Note bytes of a refused request. Some are read, so that the client gets its answer, but not all.

        At the speed of a network card, reading alone would keep the event loop busy. Returns whether that
        was enough.
        """
        self._dropped += size
        if self._dropped <= DROPPED_BYTES:
            return False
        self.pause_reading()
        return True

    def begin_body(self, now: float) -> float:
        """Start the clock of a body, and return its first deadline."""
        self._reading.renew()
        return self._reading.resume(now, 0)

    def body_deadline(self, now: float, arrived: int, *, waiting: bool = False) -> float:
        """Return the time until which more of the body has to be there.

        arrived: bytes of the body so far.
        waiting: whether the client waits for a sign that it may send; this time is not its own.
        """
        if self.read_paused or waiting:
            self._paused_at = now
            return self._reading.resume(now, arrived)
        return self._reading.charge(now, arrived)

    def begin_answer(self) -> None:
        """Forget how slowly the client has read the last answer."""
        self._writing.renew()

    def write_deadline(self, now: float) -> float:
        """Return the time until which the client has to read more of the answer; infinite: it reads."""
        return self._writing.charge(now, self._read_by_client()) if self.write_paused else math.inf

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._entry.unread = True
            self._paused_at = time.monotonic()
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self._entry.unread = False
            self._reading.skip(time.monotonic() - self._paused_at)
        super().resume_reading()

    def pause_writing(self) -> None:
        if not self.write_paused:
            super().pause_writing()
            self._entry.write_deadline = self._writing.resume(time.monotonic(), self._read_by_client())

    def resume_writing(self) -> None:
        if self.write_paused:
            self._writing.charge(time.monotonic(), self._read_by_client())
            self._entry.write_deadline = math.inf
        super().resume_writing()

    def _read_by_client(self) -> int:
        """Bytes that have reached the client: neither in the write buffer nor in the kernel's."""
        return self.sent - self._transport.get_write_buffer_size() - unacknowledged_bytes(self._socket)
