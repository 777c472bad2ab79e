"""HTTP/1.1 on one connection, with a limit on everything that a client sends or leaves unread.

uvicorn's protocol over httptools parses and answers; this class adds the limits. Bytes go to the parser in
slices, so that nothing far beyond a limit is parsed. What the connection does, and until when, is in its
entry of the table (`table.py`), whose sweep calls `expire`.
"""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from enum import IntEnum
from typing import Any, NoReturn

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState as UvicornState

from fovea.server.http.cycle import Cycle
from fovea.server.http.ending import Ending
from fovea.server.http.flow import Flow
from fovea.server.http.head import Head, check_head
from fovea.server.http.refusals import BODY_TIMEOUT, HEADER_TIMEOUT, Refusal, malformed
from fovea.server.http.rules import Rules
from fovea.server.http.sockets import has_unread_bytes, peer_is_gone
from fovea.server.http.table import Connections, Entry, Phase

SLICE = 16 * 1024
"""Bytes that the parser gets at a time."""
PIPELINED = 8
"""Requests that may wait for the answer to an earlier one on the same connection."""


class Reading(IntEnum):
    """The part of a request that the parser expects next."""

    NOTHING = 0
    HEAD = 1
    BODY = 2


class _Refused(Exception):
    """Stops the parser. The reason is in `HttpProtocol._refusal`."""


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    flow: Flow
    cycle: Cycle

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
        super().__init__(config, server_state, app_state)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=False)
        self.rules = rules
        phase = Phase.HANDSHAKE if tls else Phase.HEAD
        self.entry: Entry = table.enter(address, self, phase, time.monotonic() + rules.header_s)
        self.ending = Ending(self.entry, rules)
        self._reading = Reading.NOTHING
        self._head: Head | None = None
        self._heads = 0
        self._head_bytes = 0
        self._fed = 0
        self._framing = 0
        self._refusal: Refusal | None = None
        self._upgrade_body = False
        self._deaf = False

    # The transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=HIGH_WATER_LIMIT)
        self.flow = Flow(transport, self.entry, self.rules)
        self.ending.transport = transport
        if self.ending.begun:
            self.ending.abort()
        elif self.entry.phase is Phase.HANDSHAKE:
            self.entry.turn(Phase.HEAD, self.entry.deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ending.begun = True
        for cycle, _ in self.pipeline:
            cycle.disconnected = True
        self.pipeline.clear()
        self.entry.table.leave(self.entry)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if len(data) <= SLICE:
            self._feed(data)
        else:
            view = memoryview(data)
            for begin in range(0, len(data), SLICE):
                self._feed(view[begin : begin + SLICE])
        self._settle()

    def _feed(self, data: bytes | memoryview) -> None:
        """Parse a slice, and refuse the request if it breaks a limit or a rule."""
        if self._deaf or self.ending.begun:
            return
        before, heads = self._reading, self._heads
        self._fed = self._head_bytes + len(data)
        body_before = self.flow.body_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(memoryview(data)[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._break_off(self._refusal or malformed(str(error) or type(error).__name__))
            return
        if self._reading is Reading.BODY:
            self._count_framing(len(data) - (self.flow.body_bytes - body_before))
        elif before is not Reading.BODY and heads == self._heads:
            self._head_bytes = self._fed
            if self._fed >= self.rules.header_bytes:
                self._break_off(self._head_too_large())

    def _count_framing(self, size: int) -> None:
        """Count the bytes around a chunked body: sizes, extensions and trailers.

        They may be as many as those of the body, and one header limit more. A client that sends a long
        extension with each byte, or endless trailers, is refused.
        """
        self._framing += max(0, size)
        if self._framing > self.rules.header_bytes + SLICE + self.flow.body_bytes:
            self._break_off(malformed("its chunks are smaller than what is written around them"))

    def _ignore_upgrade(self, rest: memoryview) -> None:
        """Go on as if the client had asked for no other protocol.

        llhttp skips the body of such a request, and would read it as the next request. A second parser reads
        it, told by a head of its own how the body ends.
        """
        if self._upgrade_body and self._head is not None:
            self._upgrade_body = False
            self.parser = httptools.HttpRequestParser(_BodyOnly(self))
            length = b"transfer-encoding: chunked" if self._head.chunked else b"content-length: %d"
            line = length if self._head.chunked else length % (self._head.length or 0)
            self.parser.feed_data(b"POST / HTTP/1.1\r\nhost: x\r\n" + line + b"\r\n\r\n")
        if rest:
            self._feed(rest)

    # The parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading = Reading.HEAD

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self.rules.url_bytes:
            text = f"the request's target has more than {self.rules.url_bytes} bytes"
            self._refuse(Refusal(414, "url_too_long", text))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is Reading.BODY:
            return  # a trailer, which no route reads; among the headers it would pass for one of them
        if len(self.headers) >= self.rules.max_headers:
            text = f"the request has more than {self.rules.max_headers} headers"
            self._refuse(Refusal(431, "too_many_headers", text))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        method = self.parser.get_method().decode("ascii")
        checked = check_head(method, version, self.url, self.headers)
        if isinstance(checked, Refusal):
            self._refuse(checked)
        if self._fed > self.rules.header_bytes and self._exact_head() > self.rules.header_bytes:
            self._refuse(self._head_too_large())
        if len(self.pipeline) >= PIPELINED:
            self._refuse(malformed("too many requests on one connection wait for their turn"))
        self._head, target = checked
        self._reading = Reading.BODY
        self._heads += 1
        self._head_bytes = self._framing = self.flow.body_bytes = 0
        self._upgrade_body = self.parser.should_upgrade() and self._head.length != 0
        self._fill_scope(method, version, target)
        self._begin_cycle(version != "1.0" and self.parser.should_keep_alive() and not self._upgrade_body)

    def _fill_scope(self, method: str, version: str, target: bytes) -> None:
        parsed = httptools.parse_url(target)
        path = parsed.path.decode("ascii")
        scope = self.scope
        scope["method"] = method
        scope["http_version"] = version
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["raw_path"] = parsed.path
        scope["query_string"] = parsed.query or b""
        if self.client is not None and self.client[0] in self.rules.proxies:
            client = self.rules.proxies.client(self.headers)
            scope["client"] = self.client if client is None else (client, 0)

    def _begin_cycle(self, keep_alive: bool) -> None:
        earlier = self.cycle
        self.cycle = Cycle(
            self, self.scope, expect_100_continue=self.expect_100_continue, keep_alive=keep_alive
        )
        if earlier is None or earlier.response_complete:
            self.flow.begin_answer()
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self.flow.body_bytes += len(body)
        cycle = self.cycle
        if self._deaf or cycle.response_complete or cycle.disconnected:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._upgrade_body:
            return  # llhttp says so before the body; see _ignore_upgrade
        self._reading = Reading.NOTHING
        self.cycle.more_body = False
        self.cycle.message_event.set()

    # The cycle's calls, which takes this class for its transport

    def write(self, data: bytes) -> None:
        self.flow.sent += len(data)
        self.transport.write(data)

    def is_closing(self) -> bool:
        return self.ending.begun or self.transport.is_closing()

    def close(self) -> None:
        """Close the connection once its answer has left."""
        self.flow.resume_reading()
        self.ending.close(linger=self._reading is not Reading.NOTHING)

    def abort(self) -> None:
        """Close the connection at once."""
        self.ending.abort()

    def body_left(self) -> float:
        """Bytes of the current body that have not arrived; infinite: unknown."""
        if self._head is None or self._head.length is None:
            return float("inf")
        return self._head.length - self.flow.body_bytes

    def stop_reading(self) -> None:
        """Ignore everything that the client sends from now on."""
        self._deaf = True

    def refuse(self, refusal: Refusal) -> None:
        """Write an answer that no route gave, and close."""
        self.entry.table.refused(refusal.reason)
        if not self.ending.begun:
            self.write(refusal.response(self.server_state.default_headers))
            self.close()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.ending.begun:
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self.flow.begin_answer()
            self._start_asgi_task(cycle, app)
        self._settle()

    def _settle(self) -> None:
        """Note in the table what the connection does now, and until when it may."""
        if self.ending.begun:
            return
        entry = self.entry
        if self._reading is Reading.BODY:
            if entry.phase is not Phase.BODY:
                entry.turn(Phase.BODY, self.flow.begin_body(time.monotonic()))
        elif self.cycle is not None and not self.cycle.response_complete:
            entry.turn(Phase.ANSWER)
        elif self._reading is Reading.HEAD or self._head_bytes:
            if entry.phase is not Phase.HEAD:
                entry.turn(Phase.HEAD, time.monotonic() + self.rules.header_s)
        elif entry.phase is not Phase.IDLE:
            entry.turn(Phase.IDLE, time.monotonic() + self.rules.keep_alive_s)

    # Refusals

    def _refuse(self, refusal: Refusal) -> NoReturn:
        """Stop the parser, which calls this; `_feed` then sends the refusal."""
        self._refusal = refusal
        raise _Refused

    def _head_too_large(self) -> Refusal:
        text = f"the request line and the headers have more than {self.rules.header_bytes} bytes"
        return Refusal(431, "headers_too_large", text)

    def _exact_head(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _break_off(self, refusal: Refusal) -> None:
        """End a connection whose next bytes cannot be understood, or come too late."""
        host = self.client[0] if self.client else "unknown"
        self.rules.notices.warn(refusal.reason, f"{host}: {refusal.message}")
        self._deaf = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            if self._reading is Reading.BODY:
                self.close()  # the request has got its answer, and nobody wants its body
            else:
                self.refuse(refusal)
        elif self._reading is not Reading.BODY:
            self.entry.table.refused(refusal.reason)
            cycle.keep_alive = False  # an earlier request is being answered; nothing is read after it
        elif self.pipeline:
            self.abort()
        else:
            cycle.finish(refusal)

    # The table's calls

    def evict(self) -> bool:
        if self.entry.phase is Phase.HANDSHAKE:
            self.ending.close()
        elif has_unread_bytes(self.ending.sock):
            return False
        elif self.entry.phase is Phase.IDLE and not self.transport.get_write_buffer_size():
            self.ending.close()
        else:
            self.ending.abort()
        return True

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
            self.ending.expire()
        elif entry.phase is Phase.IDLE and has_unread_bytes(self.ending.sock):
            entry.deadline = now + self.rules.header_s  # a request is arriving just now
        else:
            entry.table.timed_out(entry.phase.name.lower())
            if self._head_bytes or self._reading is Reading.HEAD:
                self._break_off(HEADER_TIMEOUT)
            else:
                self.ending.close()

    def _expire_body(self, now: float) -> None:
        cycle = self.cycle
        waiting = cycle.waiting_for_100_continue and not cycle.response_complete
        deadline = self.flow.body_deadline(now, waiting=waiting)
        if deadline > now:
            self.entry.turn(Phase.BODY, deadline)
            return
        self.entry.table.timed_out("body")
        self._break_off(BODY_TIMEOUT)

    def shutdown(self) -> None:
        """Close the connection now, or after the answer that is being given."""
        if self.cycle is None or self.cycle.response_complete:
            self.close()
        else:
            self.cycle.keep_alive = False


class _BodyOnly:
    """Passes the body of a request that asked for another protocol on to its connection."""

    def __init__(self, connection: HttpProtocol) -> None:
        self._connection = connection

    def on_body(self, body: bytes) -> None:
        self._connection.on_body(body)

    def on_message_complete(self) -> None:
        self._connection.on_message_complete()
        self._connection.stop_reading()
