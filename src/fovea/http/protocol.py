"""HTTP/1.1 on one connection, with a deadline for everything that a client sends or leaves unread.

The reader parses (`reader.py`), a cycle answers (`cycle.py`). What the connection does, and until when, is in
its entry of the table (`table.py`), whose sweep calls `expire`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import urllib.parse
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState as UvicornState

from fovea.http.address import Proxies
from fovea.http.patience import LINGER_S, Ending, Flow, Rules, has_unread_bytes, peer_is_gone
from fovea.http.reader import ParsedHead, Part, Reader
from fovea.http.refusals import BODY_TIMEOUT, DEFECT, HEADER_TIMEOUT, SHUTTING_DOWN, Refusal, malformed
from fovea.http.table import Connections, Entry, Phase

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGISendEvent, HTTPScope
    from uvicorn.server import ServerState


_HIDES = re.compile(
    r"(?:/[^/]*){0,1}/[^/]*%(?:2F|5C)|.*%(?:2[DE]|3[0-9]|[46][1-9A-F]|[57][0-9A]|5F|7E)", re.IGNORECASE
)
"""A path that hides a route from the rules of a proxy, as /%61dmin and /admin%2Flive do.

It encodes letters, digits, "-", ".", "_" or "~", which no client does, or a slash in its first two parts,
where no names are. It is not decoded, so it is no route, and no rule has to know it."""
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class Peers(NamedTuple):
    """The two ends of a connection.

    server, client: address and port; None: unknown.
    scheme: "http" or "https".
    """

    server: tuple[str, int | None] | None
    client: tuple[str, int] | None
    scheme: str


def build_scope(head: ParsedHead, peers: Peers, state: dict[str, Any], proxies: Proxies) -> HTTPScope:
    """Return the scope of a request.

    state: the application's state; the scope gets a copy.
    proxies: proxies that may name another client in X-Forwarded-For.
    """
    path = head.path.decode("ascii")
    client = peers.client
    if client is not None and client[0] in proxies:
        named = proxies.client(head.headers)
        client = client if named is None else (named, 0)
    scope = {
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
        "state": state.copy(),
    }
    return cast("HTTPScope", scope)


log = logging.getLogger("fovea.server")
SHORT_BODY = 64 * 1024
"""Bytes of a body that no route reads, but for which a connection stays open."""


class Connection(Protocol):
    """The connection of a request, which is also the transport that uvicorn's code writes to.

    server_state: the headers of every response.
    flow: its flow control.
    entry: what it does now.
    """

    server_state: ServerState
    flow: Flow
    entry: Entry

    @property
    def body_left(self) -> float:
        """Bytes of the body that have not arrived; infinite: unknown."""
        ...

    def refuse(self, refusal: Refusal) -> None:
        """Write an answer that no route gave, and close."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...

    def on_response_complete(self) -> None:
        """The answer is complete."""
        ...


class Cycle(RequestResponseCycle):
    """Receives the body of one request and sends its answer.

    Unlike uvicorn's, it ends the connection after an answer that did not wait for its body, and while the
    server drains. It never writes a traceback for a request that the server itself has cancelled.
    """

    def __init__(
        self, owner: Connection, scope: HTTPScope, *, expect_100_continue: bool, keep_alive: bool
    ) -> None:
        """owner: the connection, which also writes and closes.

        scope: the request in ASGI's form.
        expect_100_continue: whether the client waits for a sign before it sends the body.
        keep_alive: whether the client lets the connection stay open.
        """
        super().__init__(
            scope=scope,
            transport=cast(asyncio.Transport, owner),
            flow=owner.flow,
            logger=log,
            access_logger=log,
            access_log=False,
            default_headers=owner.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expect_100_continue,
            keep_alive=keep_alive,
            on_response=owner.on_response_complete,
        )
        self._owner = owner

    def send(self, message: ASGISendEvent) -> Coroutine[Any, Any, None]:
        if self.disconnected:
            # Let others run: an application that only sends would otherwise never learn that the client left.
            return asyncio.sleep(0)
        if not self.response_started and self.keep_alive and self._is_last():
            self.keep_alive = False
        return super().send(message)

    def _is_last(self) -> bool:
        """Tell whether the connection has to end after this answer."""
        if self._owner.entry.table.draining:
            return True
        unread = self.more_body and self._owner.body_left > SHORT_BODY
        return unread or (self.more_body and self.waiting_for_100_continue)

    async def run_asgi(self, app: ASGI3Application) -> None:
        """Run the application for this request. An answer that it leaves out becomes a 500, or a 503."""
        refusal = DEFECT
        try:
            await app(self.scope, cast(Any, self.receive), cast(Any, self.send))
            if not self.response_complete and not self.disconnected:
                log.error("%s %s got no complete answer", self.scope["method"], self.scope["path"][:200])
        except asyncio.CancelledError:
            refusal = SHUTTING_DOWN
        except BaseException as error:
            log.error("%s %s failed", self.scope["method"], self.scope["path"][:200], exc_info=error)
        self.finish(refusal)

    def finish(self, refusal: Refusal) -> None:
        """End a request whose application will send nothing more. A complete answer stays as it is."""
        self.on_response = lambda: None
        if self.disconnected or self.response_complete:
            return
        self.disconnected = True
        self.message_event.set()
        if self.response_started:
            self._owner.abort()
        else:
            self.response_started = True
            self._owner.refuse(refusal)


PIPELINED = 8
"""Requests that may wait for the answer to an earlier one on the same connection."""
_PIPELINE_FULL = malformed("too many requests wait for their turn on this connection")


class HttpProtocol(asyncio.Protocol):
    """One connection.

    server_state: uvicorn's counts, and the headers of every response.
    flow: its flow control.
    entry: what it does now.
    ending: closes it.
    """

    flow: Flow

    def __init__(
        self,
        config: Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        table: Connections,
        rules: Rules,
        address: str,
        *,
        tls: bool,
    ) -> None:
        """config, server_state, app_state: uvicorn's.

        table: gets an entry for this connection.
        rules: the limits.
        address: name under which the client's connections are counted.
        tls: whether a TLS handshake comes first.
        """
        self.server_state = server_state
        phase = Phase.HANDSHAKE if tls else Phase.HEAD
        self.entry: Entry = table.enter(address, self, phase, time.monotonic() + rules.header_s)
        self.ending = Ending(self.entry, rules)
        self._app = config.loaded_app
        self._app_state = app_state
        self._rules = rules
        self._reader = Reader(rules, self)
        self._transport: asyncio.Transport | None = None
        self._peers = Peers(None, None, "https" if tls else "http")
        self._running: Cycle | None = None
        self._latest: Cycle | None = None
        self._waiting: deque[Cycle] = deque()

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = made = cast(asyncio.Transport, transport)
        made.set_write_buffer_limits(high=HIGH_WATER_LIMIT)
        self.flow = Flow(made, self.entry, self._rules)
        self._peers = Peers(get_local_addr(made), get_remote_addr(made), self._peers.scheme)
        self.ending.transport = made
        if self.ending.begun:
            self.ending.abort()
        elif self.entry.phase is Phase.HANDSHAKE:
            self.entry.turn(Phase.HEAD, self.entry.deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ending.begun = True
        self._reader.stop()
        for cycle in (self._running, *self._waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
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
        self._latest = cycle = Cycle(
            self,
            build_scope(head, self._peers, self._app_state, self._rules.proxies),
            expect_100_continue=head.expects_continue,
            keep_alive=head.keep_alive,
        )
        if self._running is None:
            self._run(cycle)
        else:
            self.flow.pause_reading()
            self._waiting.append(cycle)
        return None

    def add_body(self, body: bytes) -> None:
        cycle = self._latest
        if cycle is None or cycle.response_complete or cycle.disconnected:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def end(self) -> None:
        if self._latest is not None:
            self._latest.more_body = False
            self._latest.message_event.set()

    def _run(self, cycle: Cycle) -> None:
        self._running = cycle
        self.flow.begin_answer()
        task = asyncio.get_running_loop().create_task(cycle.run_asgi(self._app))
        task.add_done_callback(self.server_state.tasks.discard)
        self.server_state.tasks.add(task)

    # The calls of the cycle, whose transport this class is

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
            self.write(refusal.response(self.server_state.default_headers))
            self.close()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
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
                entry.turn(Phase.ANSWERED, time.monotonic() + LINGER_S)
        elif self._reader.part is Part.BODY:
            if entry.phase is Phase.BODY:
                entry.progress()
            else:
                entry.turn(Phase.BODY, self.flow.begin_body(time.monotonic()))
        elif self._running is not None:
            entry.turn(Phase.ANSWER)
        elif self._reader.begun:
            if entry.phase is not Phase.HEAD:
                entry.turn(Phase.HEAD, time.monotonic() + self._rules.header_s)
        elif entry.phase is not Phase.IDLE:
            entry.turn(Phase.IDLE, time.monotonic() + self._rules.keep_alive_s)

    def _break_off(self, refusal: Refusal) -> None:
        """End a connection whose next bytes cannot be understood, or come too late."""
        host = self._peers.client[0] if self._peers.client else "unknown"
        self._rules.notices.warn(refusal.reason, f"{host}: {refusal.message}")
        self._reader.stop()
        cycle = self._latest
        if cycle is None or cycle.response_complete:
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
            entry.deadline = now + self._rules.header_s  # a request is arriving just now
        else:
            entry.table.timed_out("body" if entry.phase is Phase.ANSWERED else entry.phase.name.lower())
            if self._reader.begun:
                self._break_off(HEADER_TIMEOUT)
            else:
                self._reader.stop()
                self.ending.close()

    def _expire_body(self, now: float) -> None:
        cycle = self._latest
        waiting = cycle is not None and cycle.waiting_for_100_continue and not cycle.response_complete
        deadline = self.flow.body_deadline(now, self._reader.body_bytes, waiting=waiting)
        if deadline > now:
            self.entry.turn(Phase.BODY, deadline)
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
        if self._latest is None or self._latest.response_complete:
            self.close()
        else:
            self._latest.keep_alive = False
