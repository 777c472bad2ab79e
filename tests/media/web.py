"""A small HTTP server on loopback that sends prepared answers and records the requests."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Web:
    """The address and the records of a test server.

    requests: the heads of the requests, as text. connections: number of connections. sent: bytes of bodies.
    open: number of answers that are being sent. most_open: its maximum.
    """

    port: int = 0
    requests: list[str] = field(default_factory=list)
    connections: int = 0
    sent: int = 0
    open: int = 0
    most_open: int = 0

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A prepared answer.

    body: sent in parts of `step` bytes with `pause` seconds after each, once `hold` is set.
    length: Content-Length. None: the body's length; -1: no header.
    stalls: nothing follows the first part until the client closes the connection.
    """

    body: bytes = b""
    status: str = "200 OK"
    headers: tuple[str, ...] = ()
    length: int | None = None
    step: int = 1 << 20
    pause: float = 0.0
    hold: asyncio.Event | None = None
    stalls: bool = False

    def head(self) -> bytes:
        length = len(self.body) if self.length is None else self.length
        lines = [f"HTTP/1.1 {self.status}", *self.headers]
        if length >= 0:
            lines.append(f"Content-Length: {length}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


Answers = Mapping[str, Answer | Callable[[str], Answer]]
"""Answers by path. An answer that depends on the request is a function of the request's head."""


@asynccontextmanager
async def serve(answers: Answers, tls: ssl.SSLContext | None = None) -> AsyncIterator[Web]:
    web = Web()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        web.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                web.requests.append(head)
                answer = answers.get(head.split()[1], Answer(status="404 Not Found"))
                answer = answer if isinstance(answer, Answer) else answer(head)
                await send(web, writer, answer)
                if answer.stalls:
                    await reader.read()
                if "connection: close" in head.lower():
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client closed the connection, as many of these tests make it do
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    web.port = server.sockets[0].getsockname()[1]
    async with server:
        yield web


async def send(web: Web, writer: asyncio.StreamWriter, answer: Answer) -> None:
    if answer.hold is not None:
        await answer.hold.wait()
    web.open += 1
    web.most_open = max(web.most_open, web.open)
    parts = [answer.body[at : at + answer.step] for at in range(0, len(answer.body), answer.step)]
    try:
        writer.write(answer.head())
        for part in parts[:1] if answer.stalls else parts[:-1]:
            await send_part(web, writer, answer, part)
    finally:
        # Counted before the last part is sent: a client that has it may open its next connection at once.
        web.open -= 1
    for part in [] if answer.stalls else parts[-1:]:
        await send_part(web, writer, answer, part)


async def send_part(web: Web, writer: asyncio.StreamWriter, answer: Answer, part: bytes) -> None:
    writer.write(part)
    web.sent += len(part)
    await writer.drain()
    await asyncio.sleep(answer.pause)
