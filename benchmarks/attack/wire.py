"""The attacker's side of a connection: raw sockets in one event loop, and a tally of what they got."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from serving import ATTACKER_KEY

PATIENCE_S = 30.0
ADDRESSES = tuple(f"127.0.1.{number}" for number in range(1, 21))
"""The attacker's addresses. The innocent clients come from another one, 127.0.0.1."""
NO_PORT_YET = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)


@dataclass
class Battle:
    """One attack while it runs.

    port: of the server.
    seconds: how long the attack lasts.
    tally: number of connections by what became of them: a status, "closed", "refused", "no answer".
    """

    port: int
    seconds: float
    payload: Any = None
    tally: Counter[str] = field(default_factory=Counter)
    end: float = 0.0
    _addresses: Any = field(default_factory=lambda: itertools.cycle(ADDRESSES))

    def start(self) -> None:
        self.end = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    async def connect(self, receive_buffer: int = 0) -> socket.socket:
        """Connect from the next of the attacker's addresses. Raises OSError."""
        line = socket.socket()
        line.setblocking(False)
        try:
            if receive_buffer:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            line.setsockopt(socket.IPPROTO_IP, NO_PORT_YET, 1)
            line.bind((next(self._addresses), 0))
            loop = asyncio.get_running_loop()
            await asyncio.wait_for(loop.sock_connect(line, ("127.0.0.1", self.port)), PATIENCE_S)
        except BaseException:
            line.close()
            raise
        return line

    async def ask(self, data: bytes, *, leave: bool = False) -> str:
        """Send bytes and count the status of the answer. leave: close as soon as the bytes are sent."""
        outcome = await self._ask(data, leave)
        self.tally[outcome] += 1
        if outcome in ("refused", "closed"):
            await asyncio.sleep(0.02)  # a refused attacker must not take the processor from the server
        return outcome

    async def _ask(self, data: bytes, leave: bool) -> str:
        try:
            line = await self.connect()
        except (OSError, TimeoutError):
            return "refused"
        loop = asyncio.get_running_loop()
        sender = asyncio.ensure_future(loop.sock_sendall(line, data))
        try:
            if leave:
                with contextlib.suppress(OSError):
                    await asyncio.wait_for(sender, max(0.1, self.left))
                return "left"
            return await asyncio.wait_for(status_of(line), max(0.1, min(PATIENCE_S, self.left)))
        except TimeoutError:
            return "no answer"
        finally:
            sender.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await sender
            line.close()

    async def crowd(self, count: int, act: Callable[[int], Awaitable[Any]]) -> None:
        """Let so many attackers act again and again until the end. act: gets a number that never repeats."""
        numbers = itertools.count()

        async def attacker() -> None:
            while self.left > 0:
                await act(next(numbers))

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(attacker())

    async def hold(
        self, count: int, begin: bytes, drip: bytes = b"", pause: float = 1.0, at_once: int = 50
    ) -> None:
        """Open connections that send `begin` and then `drip` every `pause` seconds, and hold them to the end.

        A connection that the server closes is counted and not opened again.
        """
        gate = asyncio.Semaphore(at_once)

        async def holder() -> None:
            async with gate:
                try:
                    line = await self.connect()
                except (OSError, TimeoutError):
                    self.tally["refused"] += 1
                    return
                with contextlib.suppress(OSError, TimeoutError):
                    loop = asyncio.get_running_loop()
                    await asyncio.wait_for(loop.sock_sendall(line, begin), max(0.1, min(5.0, self.left)))
            self.tally[await self._dripping(line, drip, pause)] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(holder())

    async def pour(self, begin: bytes, drip: bytes, pause: float = 0.01) -> None:
        """Send `begin`, then `drip` without end, until the server closes the connection or answers."""
        try:
            line = await self.connect()
        except (OSError, TimeoutError):
            self.tally["refused"] += 1
            await asyncio.sleep(0.2)
            return
        with contextlib.suppress(OSError, TimeoutError):
            loop = asyncio.get_running_loop()
            await asyncio.wait_for(loop.sock_sendall(line, begin), max(0.1, self.left))
        self.tally[await self._dripping(line, drip, pause)] += 1
        await asyncio.sleep(0.05)

    async def _dripping(self, line: socket.socket, drip: bytes, pause: float) -> str:
        loop = asyncio.get_running_loop()
        reader = asyncio.ensure_future(status_of(line))
        try:
            while self.left > 0 and not reader.done():
                await asyncio.wait({reader}, timeout=min(pause, max(0.01, self.left)))
                if drip and not reader.done():
                    with contextlib.suppress(OSError, TimeoutError):
                        await asyncio.wait_for(loop.sock_sendall(line, drip), max(0.1, self.left))
            return reader.result() if reader.done() else "held"
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            line.close()


async def status_of(line: socket.socket) -> str:
    """The status of the answer on a connection; "closed" if it ends without one."""
    loop = asyncio.get_running_loop()
    head = b""
    while len(head) < 12:
        try:
            piece = await loop.sock_recv(line, 4096)
        except OSError:
            return "closed"
        if not piece:
            return "closed"
        head += piece
    return head[9:12].decode("latin-1")


def request(
    path: str, body: bytes = b"", *, method: str = "POST", key: str = ATTACKER_KEY, headers: str = ""
) -> bytes:
    """A whole HTTP request. key: empty: no Authorization header."""
    lines = f"{method} {path} HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n{headers}"
    if key:
        lines += f"Authorization: Bearer {key}\r\n"
    if method == "POST" and "chunked" not in headers and "Content-Length" not in headers:
        lines += f"Content-Length: {len(body)}\r\n"
    return lines.encode() + b"Connection: close\r\n\r\n" + body


def chat(content: Any, **fields: Any) -> bytes:
    """A chat request as the attacker sends it."""
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return request("/v1/chat/completions", json.dumps(body).encode())


def images(urls: list[str], **fields: Any) -> bytes:
    """A chat request with images."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return chat([*parts, {"type": "text", "text": "What?"}], max_tokens=2, **fields)
