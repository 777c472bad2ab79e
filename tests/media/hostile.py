"""Servers that misbehave as fast as they can, in threads of their own, and a heartbeat of the event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field


@dataclass(slots=True)
class Server:
    """A server on loopback. sent: bytes that it could send. closed: set when the client has left."""

    port: int
    sent: int = 0
    closed: threading.Event = field(default_factory=threading.Event)

    def url(self, scheme: str = "http") -> str:
        return f"{scheme}://127.0.0.1:{self.port}/"


@contextmanager
def flood(head: bytes, unit: bytes = b"", pause_s: float = 0.0) -> Iterator[Server]:
    """Serve one client: `head`, and then `unit` again and again until it leaves. Without a unit: stay silent.

    pause_s: seconds between two units; 0: as fast as possible.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(listener.getsockname()[1])

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(head)
            many = unit if pause_s else unit * (65536 // max(1, len(unit)) + 1)
            while many:
                connection.sendall(many)
                server.sent += len(many)
                time.sleep(pause_s)
            while connection.recv(65536):
                pass

    def accept() -> None:
        with suppress(OSError):
            serve(listener.accept()[0])
        server.closed.set()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.close()


@dataclass(slots=True)
class Heartbeat:
    """Counts the turns of the event loop. most: the largest number of steps between two turns."""

    ticks: int = 0
    steps: int = 0
    most: int = 0

    def step(self) -> None:
        self.steps += 1
        self.most = max(self.most, self.steps)


@asynccontextmanager
async def heartbeat() -> AsyncIterator[Heartbeat]:
    beat = Heartbeat()

    async def tick() -> None:
        while True:
            beat.ticks += 1
            beat.steps = 0
            await asyncio.sleep(0)

    task = asyncio.create_task(tick())
    try:
        yield beat
    finally:
        task.cancel()
