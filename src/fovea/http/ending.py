"""The end of one connection: after its answer has left, after the rest of a refused request, or at once."""

from __future__ import annotations

import asyncio
import socket
import time

from fovea.http.rules import Rules
from fovea.http.sockets import has_unread_bytes, reset_on_close, unacknowledged_bytes
from fovea.http.table import Entry, Phase

LINGER_S = 2.0
"""Seconds that a client has for what follows its answer: the rest of a body, or its side of the end of TLS.

A socket that is closed while bytes of its client are unread resets the connection, and the client may lose
the answer.
"""
HASTE_S = 0.25
"""The seconds that are left once a client has sent more of a refused request than is read. The rest of it is
in the kernel, in memory that the connections of all processes share."""


class Ending:
    """Closes a connection, and makes sure that it ends even if its client reads nothing.

    begun: whether the server has closed the connection; nothing is read or answered any more.
    sock: the socket; None until it is accepted.
    transport: the transport; None until the connection is made.
    connecting: the task of the handshake.
    """

    __slots__ = ("_entry", "_lingers", "_rules", "_until", "begun", "connecting", "sock", "transport")

    def __init__(self, entry: Entry, rules: Rules) -> None:
        self.begun = False
        self.sock: socket.socket | None = None
        self.transport: asyncio.Transport | None = None
        self.connecting: asyncio.Task[None] | None = None
        self._entry = entry
        self._rules = rules
        self._lingers = False
        self._until = 0.0

    @property
    def pending(self) -> int:
        """Bytes of answers that have not reached the client: in the write buffer, or in the kernel's."""
        if self.transport is None:
            return 0
        return self.transport.get_write_buffer_size() + unacknowledged_bytes(self.sock)

    def close(self, *, linger: bool = False) -> None:
        """Close once the answer has left.

        linger: whether the client may still be sending its request.
        """
        if self.begun:
            return
        self.begun = True
        if self.transport is None:
            self.abort()
        elif linger:
            self._lingers = True
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._entry.turn(Phase.CLOSING, time.monotonic() + LINGER_S)
        else:
            self._close_transport(self.transport)

    def hasten(self) -> None:
        """Stop lingering soon: the client goes on sending."""
        if self._lingers:
            self._entry.turn(Phase.CLOSING, min(self._entry.deadline, time.monotonic() + HASTE_S))

    def abort(self, *, reset: bool = True) -> None:
        """Close at once, and drop the write buffer.

        reset: whether the kernel, too, drops whatever the client has not read.
        """
        self.begun = True
        self._lingers = False
        self._entry.turn(Phase.ENDED)
        if self.transport is None:
            if self.connecting is not None:
                self.connecting.cancel()
            return
        if reset:
            reset_on_close(self.sock)
        self.transport.abort()

    def make_way(self, *, cut: bool) -> bool:
        """Close at once for another connection; False: not now (see `table.Owner.evict`)."""
        if self.transport is None:
            self.abort()
            return True
        phase = self._entry.phase
        if phase is Phase.CLOSING:
            if self.pending and not cut:
                return False
        elif has_unread_bytes(self.sock) or (phase is Phase.BODY and self._entry.unread):
            return False
        unanswered = phase in (Phase.HEAD, Phase.BODY)
        self.abort(reset=unanswered or self.transport.get_write_buffer_size() > 0)
        return True

    def expire(self, now: float) -> None:
        """End a connection whose client has had its time, unless it still has some to read its answer."""
        if self._lingers and self.transport is not None:
            self._lingers = False
            self._close_transport(self.transport)
        elif self.pending and now < self._until:
            self._entry.turn(Phase.CLOSING, min(now + LINGER_S, self._until))
        elif self.pending:
            self._entry.table.timed_out("write")
            self.abort()
        else:
            self.abort(reset=False)  # the client has its answer, but does not confirm the end of TLS

    def _close_transport(self, transport: asyncio.Transport) -> None:
        """Close after the write buffer is empty. Its size decides how long that may take."""
        now = time.monotonic()
        self._until = now + self._rules.write_s + transport.get_write_buffer_size() / self._rules.rate
        transport.close()
        self._entry.turn(Phase.CLOSING, min(now + LINGER_S, self._until))
