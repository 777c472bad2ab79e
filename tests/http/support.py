"""A server for tests of connections, and raw sockets that talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvloop

from fovea.core.types import Delta, GenerationRequest, StageTimings, Usage
from fovea.http.table import Phase
from fovea.server.app import App, create_app
from fovea.server.request import Request
from fovea.server.routing import Route
from fovea.server.run import serving
from fovea.server.settings import ServerSettings
from tests.server.scripted import Script
from tests.server.support import PATIENCE

CHAT = "/v1/chat/completions"
LAST = Delta(0, " end", (3,), finish_reason="stop", usage=Usage(5, 2), timings=StageTimings())


class Torrent(Script):
    """An engine whose streams go on until their client leaves.

    text: text of every delta.
    delta: number of deltas so far.
    """

    def __init__(self, text: str = "x" * 8192) -> None:
        super().__init__()
        self.text = text
        self.deltas = 0

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        try:
            while True:
                self.deltas += 1
                await asyncio.sleep(0)
                yield Delta(0, self.text, (1,))
        finally:
            self.closed_streams += 1


@dataclass
class Answer:
    """One response of the server.

    status: 0 if the connection was closed without a response.
    """

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


class Wire:
    """A connection of a client that sends whatever bytes a test wants."""

    def __init__(self, address: tuple[str, int], receive_buffer: int = 0) -> None:
        self.sock = socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(PATIENCE)
        try:
            self.sock.connect(address)
        except ConnectionError:
            self.sock.close()
            raise
        self._rest = b""

    @staticmethod
    def free_port() -> socket.socket:
        """A socket that is bound to a free port."""
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        return sock

    def send(self, *parts: bytes | str) -> None:
        """Send bytes. A server that has closed the connection meanwhile is not an error; the answer tells."""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                self.sock.sendall(part.encode() if isinstance(part, str) else part)

    def answer(self, *, head_only: bool = False) -> Answer:
        """Read one response; status 0: the connection is closed."""
        while b"\r\n\r\n" not in self._rest:
            if not self._more():
                return Answer(0)
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines[1:])
        headers = {name.lower(): value for name, value in pairs}
        length = 0 if head_only else int(headers.get("content-length", 0))
        while len(self._rest) < length and self._more():
            pass
        body, self._rest = self._rest[:length], self._rest[length:]
        return Answer(int(lines[0].split()[1]), headers, body)

    def read_all(self) -> bytes:
        """Read until the server closes the connection."""
        while self._more():
            pass
        return self._rest

    def is_closed(self) -> bool:
        """Tell whether the server has closed the connection, without waiting."""
        self.sock.settimeout(0)
        try:
            return not self.sock.recv(1 << 16, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.sock.settimeout(PATIENCE)

    def close(self) -> None:
        self.sock.close()

    def _more(self) -> bool:
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionError:
            return False
        self._rest += data
        return bool(data)


@dataclass
class Host:
    """A running server. script: its engine."""

    url: str
    app: App
    script: Script
    wires: list[Wire] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    def connect(self, *first: bytes | str, receive_buffer: int = 0) -> Wire:
        """Open a connection and send some bytes. It is closed with the server."""
        wire = Wire(self.address, receive_buffer)
        self.wires.append(wire)
        wire.send(*first)
        return wire

    def ask(self, *request: bytes | str) -> Answer:
        """Send bytes on a new connection and return the answer."""
        return self.connect(*request).answer()

    def open_connections(self) -> int:
        return len(self.app.connections)

    def count(self, name: str, **labels: str) -> float:
        """The value of a metric."""
        return self.app.state.metrics.registry.get_sample_value(f"fovea:{name}_total", labels) or 0.0


async def who(request: Request) -> str:
    """A route that answers with the address of its client."""
    return request.address


async def size_of_body(request: Request) -> int:
    """A route that answers with the bytes of its body."""
    size, more = 0, True
    while more:
        message = await request.receive()
        size, more = size + len(message["body"]), message["more_body"]
    return size


def large(characters: int) -> Route:
    """A route with a large answer, at /large."""

    async def answer(request: Request) -> str:
        return "x" * characters

    return Route("GET", "/large", answer)


@contextlib.contextmanager
def hosting(script: Script | None = None, *, drain_s: float = 0.0, **settings: Any) -> Iterator[Host]:
    """Run a server with some settings until the block ends."""
    engine = script or Script(LAST)
    app = create_app(engine, ServerSettings.of(**settings))
    with serving(app, uvloop.new_event_loop, drain_s=drain_s) as url:
        host = Host(url, app, engine)
        try:
            yield host
        finally:
            for wire in host.wires:
                wire.close()


def get(path: str = "/health", *headers: str, version: str = "1.1") -> bytes:
    """The bytes of a GET request."""
    lines = [f"GET {path} HTTP/{version}", "Host: localhost", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def post(body: Any, *headers: str, path: str = CHAT) -> bytes:
    """The bytes of a POST request with a JSON body."""
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json",
        f"Content-Length: {len(content)}", *headers,
    ]  # fmt: skip
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + content


def in_phase(host: Host, phase: Phase) -> int:
    """The number of connections in a phase."""
    return len(host.app.connections.queues[phase])


def soon(condition: Any) -> None:
    """Wait until a condition is true, at most PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)
