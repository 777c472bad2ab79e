"""The end of one connection: after its answer has left, after the rest of a refused request, or at once."""

from __future__ import annotations

import asyncio
import socket
import time

from fovea.server.http.rules import Rules
from fovea.server.http.sockets import reset_on_close
from fovea.server.http.table import Entry, Phase

LINGER_S = 2.0
"""Seconds in which the rest of a refused request is read and dropped.

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

    __slots__ = ("_entry", "_lingers", "_rules", "begun", "connecting", "sock", "transport")

    def __init__(self, entry: Entry, rules: Rules) -> None:
        self.begun = False
        self.sock: socket.socket | None = None
        self.transport: asyncio.Transport | None = None
        self.connecting: asyncio.Task[None] | None = None
        self._entry = entry
        self._rules = rules
        self._lingers = False

    def close(self, *, linger: bool = False) -> None:
        """Close once the answer has left.

        linger: whether the client may still be sending its request.
        """
        if self.begun:
            return
        self.begun = True
        if self.transport is None:
            self._stop_connecting()
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

    def abort(self) -> None:
        """Close at once. Whatever the client has not read is dropped, also by the kernel."""
        self.begun = True
        if self.transport is None:
            self._stop_connecting()
            return
        reset_on_close(self.sock)
        self.transport.abort()
        self._entry.turn(Phase.CLOSING)

    def expire(self) -> None:
        """Close for good what has lingered; abort what could not be written in time."""
        if self._lingers and self.transport is not None:
            self._lingers = False
            self._close_transport(self.transport)
            return
        if self.transport is not None and self.transport.get_write_buffer_size():
            self._entry.table.timed_out("write")
        self.abort()

    def _close_transport(self, transport: asyncio.Transport) -> None:
        """Close after the write buffer is empty. Its size decides how long that may take."""
        seconds = self._rules.write_s + transport.get_write_buffer_size() / self._rules.rate
        transport.close()
        self._entry.turn(Phase.CLOSING, time.monotonic() + seconds)

    def _stop_connecting(self) -> None:
        if self.connecting is not None:
            self.connecting.cancel()
