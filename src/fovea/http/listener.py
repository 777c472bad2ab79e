"""Accepts connections while there is room for them.

The event loops' own servers accept everything, and close connections without an answer when descriptors run
out. This one accepts only what the table has room for. Other connections wait in the kernel's queue until one
ends.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from fovea.http.address import client_key
from fovea.http.patience import Rules, peer_is_gone
from fovea.http.protocol import HttpProtocol
from fovea.http.refusals import TOO_MANY
from fovea.http.table import Connections, Phase

log = logging.getLogger("fovea.server")
RESERVE = 128
"""Descriptors that are kept for everything but connections: downloads, checkpoints, caches on disk, logs."""
LEAST = 8


def allowed_connections(wanted: int) -> int:
    """Raise the process's limit to the highest that it may set, and return how many connections fit.

    wanted: the number of connections that the settings allow.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft != hard and (hard == resource.RLIM_INFINITY or soft < hard):
        soft = _raise_limit(wanted, soft, hard)
    fitting = max(LEAST, soft - _open_now() - RESERVE)
    if fitting < wanted:
        log.warning(
            "at most %d connections instead of %d: the process may open %d files (ulimit -n)",
            fitting, wanted, soft,
        )  # fmt: skip
    return min(wanted, fitting)


def _raise_limit(wanted: int, soft: int, hard: int) -> int:
    goal = hard if hard != resource.RLIM_INFINITY else max(soft, wanted + 8 * RESERVE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
    except (OSError, ValueError):
        return soft
    return goal


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return RESERVE // 2


PAUSE_S = 0.5
"""Seconds without accepting after descriptors or memory ran out."""
GONE_AT_ONCE = 64
"""Connections without a client that are closed in one iteration of the event loop."""
RETRY_S = 0.1
"""Seconds after which a full table is asked again for a connection that can be closed."""
TLS_END_S = 24 * 3600.0
"""Seconds after which asyncio would end a TLS connection that is closing, even while its client reads the
answer. The deadlines of the table come first."""
BACKLOG = 2048
_LATER = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

MakeProtocol = Callable[[str, bool], HttpProtocol]
"""Creates the protocol of a connection from the name of its client's address and from whether it has TLS."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Open the listening sockets of a host, one for each of its addresses.

    port: 0: any free one. Raises OSError if an address cannot be used.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, proto, _, address in dict.fromkeys(found):
            sock = socket.socket(family, kind, proto)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = port or sockets[0].getsockname()[1]
            sock.bind((address[0], chosen, *address[2:]))
            prepare(sock)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def prepare(sock: socket.socket) -> None:
    """Start to listen. Accepted sockets inherit these options.

    Small writes leave at once, and a client that has vanished without a word is noticed after two minutes.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 120_000}
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.listen(BACKLOG)


def _has_waiting(listening: socket.socket) -> bool:
    """Tell whether a connection waits to be accepted."""
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    return bool(poll.poll(0))


class Listener:
    """Accepts the connections of some listening sockets.

    tls: the context of new TLS connections, which may be replaced at any time; None: plain HTTP.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        table: Connections,
        rules: Rules,
        make_protocol: MakeProtocol,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.tls = tls
        self._sockets = tuple(sockets)
        self._table = table
        self._rules = rules
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._open = False
        self._reading = False
        self._was_full = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to accept."""
        self._open = True
        self._table.on_room = self._resume
        self._resume()

    def close(self) -> None:
        """Stop accepting, and close the sockets."""
        self._pause()
        self._open = False
        for sock in self._sockets:
            sock.close()

    def _resume(self) -> None:
        if self._open and not self._reading:
            self._reading = True
            for sock in self._sockets:
                self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            for sock in self._sockets:
                self._loop.remove_reader(sock.fileno())

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection. The event loop calls this again while more of them wait.

        Connections whose clients have left already are closed unread: a flood of them would keep the others
        waiting in the kernel's queue.
        """
        if self._table.full:
            self._make_room(listening)
            return
        for _ in range(GONE_AT_ONCE):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._pause_after(error)
                return
            if not peer_is_gone(sock):
                self._was_full = False
                self._take(sock, client_key(address[0]))
                return
            sock.close()
            self._table.refused("left")

    def _make_room(self, listening: socket.socket) -> None:
        """Close a connection for the one that waits, if there is one, and wait until a descriptor is free.

        Without one that can be closed, wait for an end, or until one that was about to be read may be closed.
        """
        if not _has_waiting(listening):
            return
        if not self._table.make_room() and not self._was_full:
            self._was_full = True
            self._rules.notices.warn("full", f"all {self._table.capacity} connections are busy; others wait")
            self._table.refused("full")
        self._pause()
        self._loop.call_later(RETRY_S, self._resume)

    def _pause_after(self, error: OSError) -> None:
        """Wait before the next attempt: the reason, such as a lack of descriptors, does not end at once."""
        reason = "descriptors" if error.errno in _LATER else "accept"
        self._rules.notices.warn(reason, f"no connection can be accepted for now: {error.strerror}")
        self._table.refused(reason)
        self._pause()
        self._loop.call_later(PAUSE_S, self._resume)

    def _take(self, sock: socket.socket, address: str) -> None:
        if not self._table.accepts(address):
            self._refuse(sock, address)
            return
        sock.setblocking(False)
        protocol = self._make_protocol(address, self.tls is not None)
        protocol.ending.sock = sock
        task = self._loop.create_task(self._connect(sock, protocol))
        protocol.ending.connecting = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._connected, sock, protocol))

    async def _connect(self, sock: socket.socket, protocol: HttpProtocol) -> None:
        """Give the socket to the event loop. With TLS this lasts until the handshake ends."""
        if self.tls is None:
            await self._loop.connect_accepted_socket(lambda: protocol, sock)
        else:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=self.tls,
                ssl_handshake_timeout=self._rules.header_s + 1,
                ssl_shutdown_timeout=TLS_END_S,
            )

    def _connected(self, sock: socket.socket, protocol: HttpProtocol, task: asyncio.Task[None]) -> None:
        """Forget a socket that did not become a connection: its client left, or it was closed for others."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        if error is not None and protocol.entry.phase is Phase.HANDSHAKE:
            self._table.refused("tls")
            self._rules.notices.warn("tls", f"{protocol.entry.address}: the TLS handshake failed: {error}")
        sock.close()
        self._table.leave(protocol.entry)

    def _refuse(self, sock: socket.socket, address: str) -> None:
        """Tell a client that its address has too many connections, without waiting. With TLS, only close."""
        self._table.refused(TOO_MANY.reason)
        self._rules.notices.warn(TOO_MANY.reason, f"{address}: {TOO_MANY.message}")
        with suppress(OSError), sock:
            sock.setblocking(False)
            if self.tls is None:
                sock.send(TOO_MANY.response())
                sock.shutdown(socket.SHUT_WR)
                sock.recv(64 * 1024)  # unread bytes would reset the connection before the answer is read
