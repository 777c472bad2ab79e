"""The server's HTTP protocol over a transport without a socket: bytes in, bytes out.

No bytes raise, no answer is malformed or a 5xx, and the requests do not depend on how the bytes were cut: a
proxy that sees other requests than the server could be deceived (request smuggling).
"""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from typing import Any

import httptools

from fovea.http.patience import Rules
from fovea.http.protocol import HttpProtocol
from fovea.http.settings import HttpSettings
from fovea.http.table import Connections
from tests.fuzz.refusals import note

LONGEST = 4096
WORDS = (
    b"GET / HTTP/1.1\r\n", b"POST /v1/chat/completions HTTP/1.1\r\n", b"HTTP/1.0", b"HTTP/1.2",
    b"Host: a\r\n", b"\r\n", b"\n", b"\r", b"Content-Length: 5\r\n", b"Content-Length: +5\r\n",
    b"Content-Length: 18446744073709551617\r\n", b"5, 5", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding : chunked\r\n", b"Connection: close\r\n",
    b"Connection: keep-alive\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n",
    b"Expect: 100-continue\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b"5;a=b\r\n", b"ffffffffffffffff\r\n",
    b"X-A: b\r\n", b" folded\r\n", b"\0", b"\xff", b"\x0b", b"OPTIONS * HTTP/1.1\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n", b"http://b/", b"//", b"/..", b"%00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)  # fmt: skip
LIMITS = HttpSettings(max_header_kib=1, max_headers=8, max_url_kib=1)


class Transport(asyncio.Transport):
    """Keeps what is written. A client that reads everything at once is at the other end."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 80), "peername": ("127.0.0.2", 5000)})
        self.written = b""
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def write_eof(self) -> None: ...

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None: ...


@cache
def _loop() -> asyncio.AbstractEventLoop:
    logging.getLogger("fovea.server").setLevel(logging.CRITICAL)
    return asyncio.new_event_loop()


class App:
    """An application that records the requests and answers them."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.requests.append((scope["method"], scope["raw_path"], list(scope["headers"]), body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def target(data: bytes) -> None:
    whole = _requests(data, len(data) or 1)
    for size in (1, 13):
        pieces = _requests(data, size)
        for one, other in zip(whole, pieces, strict=False):
            assert one == other, f"pieces of {size} bytes are other requests: {one!r:.200} and {other!r:.200}"
    note(f"{len(whole)} requests {sum(bool(request[3]) for request in whole)}")


def _requests(data: bytes, size: int) -> list[Any]:
    """Send bytes in pieces. Returns the requests that reached the application."""
    loop, app = _loop(), App()
    problems: list[str] = []
    loop.set_exception_handler(
        lambda _, context: problems.append(str(context.get("exception", context["message"])))
    )
    asyncio.set_event_loop(loop)

    async def serve() -> bytes:
        table = Connections(16)
        protocol = HttpProtocol(app, table, Rules(LIMITS), "127.0.0.2", tls=False)
        transport = Transport()
        protocol.connection_made(transport)
        for at in range(0, len(data), size):
            if not transport.closing:
                protocol.data_received(data[at : at + size])
            if size > 1 or data[at : at + 1] == b"\n":
                await asyncio.sleep(0)
        for _ in range(40):
            await asyncio.sleep(0)
        protocol.eof_received()
        protocol.connection_lost(None)
        for _ in range(4):
            await asyncio.sleep(0)
        assert not len(table), "the connection is still in the table"
        return transport.written

    written = loop.run_until_complete(serve())
    assert not problems, problems[0]
    _check(written)
    return app.requests


def _check(written: bytes) -> None:
    """Parse all answers."""
    parser: Any = None

    class Answer:
        """Collects the answers' statuses, and makes a new parser for each."""

        def on_message_complete(self) -> None:
            status = parser.get_status_code()
            assert status < 500 or status in (501, 505), f"status {status}"
            note(str(status))

    parser = httptools.HttpResponseParser(Answer())
    try:
        parser.feed_data(written)
    except httptools.HttpParserError as error:
        raise AssertionError(f"the answer is malformed: {error}: {written!r:.300}") from error


def seeds() -> list[bytes]:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    return [
        b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 3,
        head + b"Content-Length: 2\r\n\r\n{}", chunked + b"2\r\n{}\r\n0\r\n\r\n",
        chunked + b"2;a=b\r\n{}\r\n0\r\nX-T: 1\r\n\r\n", chunked + b"0\r\n" + b"X-T: 1\r\n" * 300,
        chunked + b"2;" + b"a" * 3000, head + b"X: " + b"a" * 3000, head + b"A: b\r\n" * 40 + b"\r\n",
        b"GET /" + b"a" * 2000,
        head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        head + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}a", head + b"Content-Length: -1\r\n\r\n",
        head + b"Transfer-Encoding: gzip\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n",
        b"GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"\x16\x03\x01", b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n\r\n",
        head + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}", head + b" folded: a\r\n\r\n",
        head + b"X\0: a\r\n\r\n", b"GET / HTTP/1.1\n\n",
        head + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\n\r\n",
    ]  # fmt: skip
