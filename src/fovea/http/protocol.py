"""HTTP/1.1 on one connection, with a deadline for everything that a client sends or leaves unread.

The reader parses (`reader.py`), a cycle answers. What the connection does, and until when, is in
its entry of the table (`table.py`), whose sweep calls `expire`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import urllib.parse
from collections import deque
from collections.abc import Awaitable, Sequence
from functools import cache
from http import HTTPStatus
from typing import NamedTuple, Protocol, cast

from fovea.http.address import Proxies
from fovea.http.bodies import Message, Receive, Scope, Send
from fovea.http.patience import LINGER_S, Ending, Flow, Rules, has_unread_bytes, peer_is_gone
from fovea.http.reader import ParsedHead, Part, Reader
from fovea.http.refusals import BODY_TIMEOUT, DEFECT, HEADER_TIMEOUT, SHUTTING_DOWN, Refusal, malformed
from fovea.http.table import Connections, Entry, Phase

HIGH_WATER = 64 * 1024
"""Bytes of a body that wait for the application, and of an answer that wait for the client, before the other
side has to wait."""
_LINE_END = re.compile(rb"[\r\n\x00]")
_HIDES = re.compile(
    r"(?:/[^/]*){0,1}/[^/]*%(?:2F|5C)|.*%(?:2[DE]|3[0-9]|[46][1-9A-F]|[57][0-9A]|5F|7E)", re.IGNORECASE
)
"""A path that hides a route from the rules of a proxy, as /%61dmin and /admin%2Flive do.

It encodes letters, digits, "-", ".", "_" or "~", which no client does, or a slash in its first two parts,
where no names are. It is not decoded, so it is not a route, and no rule has to know it."""
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class Application(Protocol):
    """An application of ASGI that the server starts and stops by calls."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def start(self) -> Awaitable[None]:
        """Prepare to serve. The port is not open yet."""
        ...

    def stop(self) -> Awaitable[None]:
        """End. The port is closed, and no request is left."""
        ...


class Peers(NamedTuple):
    """The two ends of a connection.

    server, client: address and port; None: unknown.
    scheme: "http" or "https".
    """

    server: tuple[str, int | None] | None
    client: tuple[str, int] | None
    scheme: str


def build_scope(head: ParsedHead, peers: Peers, proxies: Proxies) -> Scope:
    """Return the scope of a request.

    proxies: proxies that may name another client in X-Forwarded-For.
    """
    path = head.path.decode("ascii")
    client = peers.client
    if client is not None and client[0] in proxies:
        named = proxies.client(head.headers)
        client = client if named is None else (named, 0)
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": head.version,
        "server": peers.server,
        "client": client,
        "scheme": peers.scheme,
        "method": head.method,
        "root_path": "",
        "path": urllib.parse.unquote(path) if "%" in path and not _HIDES.match(path) else path,
        "raw_path": head.path,
        "query_string": head.query,
        "headers": head.headers,
    }


log = logging.getLogger("fovea.server")
SHORT_BODY = 64 * 1024
"""Bytes of a body that no route reads, but for which a connection stays open."""


class Cycle:
    """Receives the body of one request and sends its answer.

    It ends the connection after an answer that did not wait for its body, and while the server drains. It
    never writes a traceback for a request that the server itself has cancelled.

    body: bytes that have arrived and that the application has not taken yet.
    more_body: whether more of the body will come.
    keep_alive: whether the connection may stay open after the answer.
    started, complete: whether the answer has begun, and whether it is complete.
    disconnected: whether nothing more is sent: the client has left, or got an answer that no route gave.
    waiting_for_100_continue: whether the client waits for a sign before it sends the body.
    news: set when the application that waits for the body has to look again.
    """

    def __init__(self, connection: HttpProtocol, scope: Scope, head: ParsedHead) -> None:
        """connection: writes and closes. scope: the request in ASGI's form. head: the same, as parsed."""
        self.body = bytearray()
        self.more_body = True
        self.keep_alive = head.keep_alive
        self.started = False
        self.complete = False
        self.disconnected = False
        self.waiting_for_100_continue = head.expects_continue
        self.news = asyncio.Event()
        self._connection = connection
        self._scope = scope
        self._bodiless = head.method == "HEAD"
        self._chunked = False
        self._left = 0

    async def run(self, app: Application) -> None:
        """Run the application for this request. An answer that it leaves out becomes a 500, or a 503."""
        refusal = DEFECT
        try:
            await app(self._scope, self.receive, self.send)
            if not self.complete and not self.disconnected:
                log.error("%s %s got no complete answer", self._scope["method"], self._scope["path"][:200])
        except asyncio.CancelledError:
            refusal = SHUTTING_DOWN
        except BaseException as error:
            log.error("%s %s failed", self._scope["method"], self._scope["path"][:200], exc_info=error)
        self.finish(refusal)

    async def receive(self) -> Message:
        """Return the next part of the body, or that the client has left or has its answer."""
        if self.waiting_for_100_continue and not self._connection.is_closing():
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.complete:
            self._connection.flow.resume_reading()
            await self.news.wait()
            self.news.clear()
        if self.disconnected or self.complete:
            return {"type": "http.disconnect"}
        message = {"type": "http.request", "body": bytes(self.body), "more_body": self.more_body}
        self.body.clear()
        return message

    async def send(self, message: Message) -> None:
        """Send the head of the answer, or a part of its body. Waits while the client reads too slowly."""
        flow = self._connection.flow
        if flow.write_paused and not self.disconnected:
            await flow.drain()
        if self.disconnected:
            # Let others run: an application that only sends would otherwise never learn that the client left.
            await asyncio.sleep(0)
        elif message["type"] == "http.response.start":
            self._start(message["status"], message["headers"])
        else:
            self._write(message.get("body", b""), more=message.get("more_body", False))

    def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        if self.started:
            raise RuntimeError("the answer has begun already")
        self.started = True
        self.waiting_for_100_continue = False
        self.keep_alive = self.keep_alive and not self._is_last()
        self._bodiless = self._bodiless or status in (204, 304)
        lines = [_status_line(status)]
        for name, value in (*self._connection.rules.headers, *headers):
            if _LINE_END.search(name) or _LINE_END.search(value):
                raise RuntimeError(f"the header {name!r} of the answer has a line end")
            if name == b"content-length":
                self._left = int(value)
            lines.append(name + b": " + value)
        self._chunked = not self._bodiless and all(name != b"content-length" for name, _ in headers)
        if self._chunked:
            lines.append(b"transfer-encoding: chunked")
        if not self.keep_alive:
            lines.append(b"connection: close")
        self._connection.write(b"\r\n".join(lines) + b"\r\n\r\n")

    def _write(self, data: bytes, *, more: bool) -> None:
        if not self.started or self.complete:
            raise RuntimeError("a part of the body comes before the answer begins, or after its end")
        if self._bodiless:
            data = b""
        elif self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data += b"" if more else b"0\r\n\r\n"
        else:
            self._left -= len(data)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the body of the answer does not have the bytes of its content-length")
        if data:
            self._connection.write(data)
        if not more:
            self.complete = True
            self.news.set()
            if not self.keep_alive:
                self._connection.close()
            self._connection.on_answered()

    def _is_last(self) -> bool:
        """Tell whether the connection has to end after this answer."""
        if self._connection.entry.table.draining:
            return True
        unread = self.more_body and self._connection.body_left > SHORT_BODY
        return unread or (self.more_body and self.waiting_for_100_continue)

    def finish(self, refusal: Refusal) -> None:
        """End a request whose application will send nothing more. A complete answer stays as it is."""
        if self.disconnected or self.complete:
            return
        self.disconnected = True
        self.news.set()
        if self.started:
            self._connection.abort()
        else:
            self.started = True
            self._connection.refuse(refusal)


@cache
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}".encode()


PIPELINED = 8
"""Requests that may wait for the answer to an earlier one on the same connection."""
_PIPELINE_FULL = malformed("too many requests wait on this connection")


class HttpProtocol(asyncio.Protocol):
    """One connection.

    rules: the limits of the server.
    flow: its flow control.
    entry: what it does now.
    ending: closes it.
    """

    flow: Flow

    def __init__(
        self, app: Application, table: Connections, rules: Rules, address: str, *, tls: bool
    ) -> None:
        """table: gets an entry for this connection.

        address: name under which the client's connections are counted.
        tls: whether a TLS handshake comes first.
        """
        self.rules = rules
        phase = Phase.HANDSHAKE if tls else Phase.HEAD
        self.entry: Entry = table.enter(address, self, phase, time.monotonic() + rules.header_s)
        self.ending = Ending(self.entry, rules)
        self._app = app
        self._reader = Reader(rules, self)
        self._transport: asyncio.Transport | None = None
        self._peers = Peers(None, None, "https" if tls else "http")
        self._running: Cycle | None = None
        self._latest: Cycle | None = None
        self._waiting: deque[Cycle] = deque()

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = made = cast(asyncio.Transport, transport)
        made.set_write_buffer_limits(high=HIGH_WATER)
        self.flow = Flow(made, self.entry, self.rules)
        self._peers = Peers(_address(made, "sockname"), _address(made, "peername"), self._peers.scheme)
        self.ending.transport = made
        if self.ending.begun:
            self.ending.abort()
        elif self.entry.phase is Phase.HANDSHAKE:
            self.entry.set_phase(Phase.HEAD, self.entry.deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ending.begun = True
        self._reader.stop()
        for cycle in (self._running, *self._waiting):
            if cycle is not None and not cycle.complete:
                cycle.disconnected = True
                cycle.news.set()
        self._waiting.clear()
        self.flow.resume_writing()
        self.entry.table.leave(self.entry)

    def data_received(self, data: bytes) -> None:
        if self._reader.stopped:
            if self.flow.drop(len(data)):
                self.ending.hasten()
            return
        refusal = self._reader.feed(data)
        if refusal is not None:
            self._break_off(refusal)
        self._settle()

    def eof_received(self) -> None:
        """Let the transport close: a client that has ended its side is gone."""

    def pause_writing(self) -> None:
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.flow.resume_writing()

    # The reader's calls

    def begin(self, head: ParsedHead) -> Refusal | None:
        if len(self._waiting) >= PIPELINED:
            return _PIPELINE_FULL
        self._latest = cycle = Cycle(self, build_scope(head, self._peers, self.rules.proxies), head)
        if self._running is None:
            self._run(cycle)
        else:
            self.flow.pause_reading()
            self._waiting.append(cycle)
        return None

    def add_body(self, body: bytes) -> None:
        cycle = self._latest
        if cycle is None or cycle.complete or cycle.disconnected:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER:
            self.flow.pause_reading()
        cycle.news.set()

    def end(self) -> None:
        if self._latest is not None:
            self._latest.more_body = False
            self._latest.news.set()

    def _run(self, cycle: Cycle) -> None:
        self._running = cycle
        self.flow.begin_answer()
        task = asyncio.get_running_loop().create_task(cycle.run(self._app))
        task.add_done_callback(self.rules.tasks.discard)
        self.rules.tasks.add(task)

    # The calls of the cycle

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self.flow.sent += len(data)
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self.ending.begun

    def close(self) -> None:
        """Close the connection once its answer has left."""
        if self._transport is not None:
            self.flow.resume_reading()
        self._reader.stop()
        self.ending.close(linger=self._reader.part is not Part.NOTHING)

    def abort(self) -> None:
        """Close the connection at once."""
        self.ending.abort()

    @property
    def body_left(self) -> float:
        """Bytes of the current body that have not arrived; infinite: unknown."""
        return self._reader.body_left

    def refuse(self, refusal: Refusal) -> None:
        """Write an answer that no route gave, and close."""
        self.entry.table.refused(refusal.reason)
        if not self.ending.begun:
            self.write(refusal.response(self.rules.headers))
            self.close()

    def on_answered(self) -> None:
        """Go on with the next request, because an answer is complete."""
        self._running = None
        if self.ending.begun:
            return
        self.flow.resume_reading()
        if self._waiting:
            self._run(self._waiting.popleft())
        self._settle()

    def _settle(self) -> None:
        """Note in the table what the connection does now, and until when it may."""
        if self.ending.begun:
            return
        entry = self.entry
        if self._reader.part is Part.BODY and self._running is None:
            if entry.phase is not Phase.ANSWERED:
                entry.set_phase(Phase.ANSWERED, time.monotonic() + LINGER_S)
        elif self._reader.part is Part.BODY:
            if entry.phase is Phase.BODY:
                entry.progress()
            else:
                entry.set_phase(Phase.BODY, self.flow.begin_body(time.monotonic()))
        elif self._running is not None:
            entry.set_phase(Phase.ANSWER)
        elif self._reader.begun:
            if entry.phase is not Phase.HEAD:
                entry.set_phase(Phase.HEAD, time.monotonic() + self.rules.header_s)
        elif entry.phase is not Phase.IDLE:
            entry.set_phase(Phase.IDLE, time.monotonic() + self.rules.keep_alive_s)

    def _break_off(self, refusal: Refusal) -> None:
        """End a connection whose next bytes cannot be understood, or come too late."""
        host = self._peers.client[0] if self._peers.client else "unknown"
        self.rules.notices.warn(refusal.reason, f"{host}: {refusal.message}")
        self._reader.stop()
        cycle = self._latest
        if cycle is None or cycle.complete:
            if self._reader.part is Part.BODY:
                self.close()  # the request has got its answer, and nobody wants its body
            else:
                self.refuse(refusal)
        elif self._reader.part is not Part.BODY:
            self.entry.table.refused(refusal.reason)
            cycle.keep_alive = False  # an earlier request is being answered; nothing is read after it
        elif self._waiting:
            self.abort()
        else:
            cycle.finish(refusal)

    # The table's calls

    def evict(self, *, cut: bool) -> bool:
        return self.ending.make_way(cut=cut)

    def tend(self, now: float) -> None:
        if peer_is_gone(self.ending.sock):
            self.ending.abort()

    def expire(self, now: float) -> None:
        entry = self.entry
        if entry.write_deadline <= now:
            entry.write_deadline = self.flow.write_deadline(now)
            if entry.write_deadline <= now:
                entry.table.timed_out("write")
                self.ending.abort()
                return
        if entry.deadline > now:
            return
        if entry.phase is Phase.BODY:
            self._expire_body(now)
        elif entry.phase is Phase.CLOSING:
            self.ending.expire(now)
        elif entry.phase is Phase.IDLE and has_unread_bytes(self.ending.sock):
            entry.deadline = now + self.rules.header_s  # a request is arriving just now
        else:
            entry.table.timed_out("body" if entry.phase is Phase.ANSWERED else entry.phase.name.lower())
            if self._reader.begun:
                self._break_off(HEADER_TIMEOUT)
            else:
                self._reader.stop()
                self.ending.close()

    def _expire_body(self, now: float) -> None:
        cycle = self._latest
        waiting = cycle is not None and cycle.waiting_for_100_continue and not cycle.complete
        deadline = self.flow.body_deadline(now, self._reader.body_bytes, waiting=waiting)
        if deadline > now:
            self.entry.set_phase(Phase.BODY, deadline)
            return
        self.entry.table.timed_out("body")
        self._break_off(BODY_TIMEOUT)

    def cut(self) -> None:
        """Answer a request whose body is still arriving with an error, because the server ends."""
        if self._reader.part is Part.BODY and self._running is not None and not self._waiting:
            self._reader.stop()
            self._running.finish(SHUTTING_DOWN)

    def shutdown(self) -> None:
        """Close the connection now, or after the answer that is being given."""
        if self._latest is None or self._latest.complete:
            self.close()
        else:
            self._latest.keep_alive = False


def _address(transport: asyncio.Transport, name: str) -> tuple[str, int] | None:
    """Return the address and port of one end of a connection; None: unknown."""
    found = transport.get_extra_info(name)
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) and len(found) >= 2 else None
