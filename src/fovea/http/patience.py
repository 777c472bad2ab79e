"""Flow control of one connection, the patience with a slow client, and the end of the connection.

A client has some seconds of patience. Waiting for it uses them up; every `rate` bytes that it transfers give
one second back, up to the limit. So a client may be silent for that long, and in the long run it has to be as
fast as the least rate. The time in which the server does not read is not counted. Answers are counted only
while the write buffer is over its limit.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import socket
import struct
import termios
import time
from contextlib import suppress
from typing import Any

from fovea.http.address import Proxies
from fovea.http.refusals import Notices
from fovea.http.settings import HttpSettings
from fovea.http.table import Entry, Phase

KIB = 1024


class Rules:
    """Limits in bytes and seconds, and what the connections of one server share.

    header_bytes, url_bytes: longest request line with headers, and longest target.
    max_headers: most headers.
    header_s, body_s, write_s, keep_alive_s: times of `HttpSettings`.
    rate: bytes that give a body or an answer one more second.
    proxies: proxies whose X-Forwarded-For is believed.
    notices: writes the log.
    headers: of every answer.
    tasks: of the requests that are being answered.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self.header_bytes = settings.max_header_kib * KIB
        self.url_bytes = settings.max_url_kib * KIB
        self.max_headers = settings.max_headers
        self.header_s = settings.header_timeout_s
        self.body_s = settings.body_timeout_s
        self.write_s = settings.write_timeout_s
        self.keep_alive_s = settings.keep_alive_s
        self.rate = settings.least_rate_kib * KIB
        self.proxies = Proxies(settings.trusted_proxies)
        self.notices = Notices()
        self.headers: list[tuple[bytes, bytes]] = []
        self.tasks: set[asyncio.Task[None]] = set()


_GONE = frozenset({0, 7, 8, 9, 11})
"""States of a TCP connection in which its peer has ended it: ended, CLOSE, CLOSE_WAIT, LAST_ACK, CLOSING."""
_RESET = struct.pack("ii", 1, 0)


def has_unread_bytes(sock: socket.socket | None) -> bool:
    """Tell whether bytes have arrived that nobody has read yet."""
    try:
        return sock is not None and bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def peer_is_gone(sock: socket.socket | None) -> bool:
    """Tell whether the peer has closed the connection, even if bytes before its end are still unread.

    Only Linux knows; elsewhere the answer is False.
    """
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _GONE
    except OSError:
        return False


def unacknowledged_bytes(sock: Any) -> int:
    """Return the bytes in the kernel's send buffer, which the peer has not acknowledged; 0: unknown.

    sock: a socket, or a transport's view of it; None: there is none.
    """
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    except (AttributeError, OSError, ValueError):
        return 0


def reset_on_close(sock: socket.socket | None) -> None:
    """Let the next close drop what the kernel holds for the peer, instead of waiting until the peer reads."""
    if sock is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


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


class Flow:
    """Pauses reading and writing, and measures how long the client lets the server wait.

    sent: bytes that were handed to the transport.
    read_paused: whether the server does not read for now.
    write_paused: whether the client reads too slowly, so that nothing more is to be written for now.
    """

    def __init__(self, transport: asyncio.Transport, entry: Entry, rules: Rules) -> None:
        self.sent = 0
        self.read_paused = False
        self.write_paused = False
        self._transport = transport
        self._writable = asyncio.Event()
        self._writable.set()
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

    async def drain(self) -> None:
        """Wait until there is room for more of the answer."""
        await self._writable.wait()

    def pause_reading(self) -> None:
        """Stop reading."""
        if not self.read_paused:
            self.read_paused = self._entry.unread = True
            self._paused_at = time.monotonic()
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if self.read_paused:
            self.read_paused = self._entry.unread = False
            self._reading.skip(time.monotonic() - self._paused_at)
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Note that the write buffer is full."""
        if not self.write_paused:
            self.write_paused = True
            self._writable.clear()
            self._entry.write_deadline = self._writing.resume(time.monotonic(), self._read_by_client())

    def resume_writing(self) -> None:
        """Note that the write buffer has room."""
        if self.write_paused:
            self.write_paused = False
            self._writing.charge(time.monotonic(), self._read_by_client())
            self._entry.write_deadline = math.inf
            self._writable.set()

    def _read_by_client(self) -> int:
        """Bytes that have reached the client: neither in the write buffer nor in the kernel's."""
        return self.sent - self._transport.get_write_buffer_size() - unacknowledged_bytes(self._socket)


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
            self._entry.set_phase(Phase.CLOSING, time.monotonic() + LINGER_S)
        else:
            self._close_transport(self.transport)

    def hasten(self) -> None:
        """Stop lingering soon: the client goes on sending."""
        if self._lingers:
            self._entry.set_phase(Phase.CLOSING, min(self._entry.deadline, time.monotonic() + HASTE_S))

    def abort(self, *, reset: bool = True) -> None:
        """Close at once, and drop the write buffer.

        reset: whether the kernel, too, drops whatever the client has not read.
        """
        self.begun = True
        self._lingers = False
        self._entry.set_phase(Phase.ENDED)
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
            self._entry.set_phase(Phase.CLOSING, min(now + LINGER_S, self._until))
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
        self._entry.set_phase(Phase.CLOSING, min(now + LINGER_S, self._until))
