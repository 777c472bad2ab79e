"""Slow clients: sockets that read a long answer byte by byte, or send a body in small pieces."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from connection import request

RECEIVE_BYTES = 4096
"""Receive buffer of a slow reader; the kernel would read ahead for it otherwise."""
STREAM_EVENTS = 20_000
"""Events of a stream that nobody reads: 4 MB, more than all buffers on the way."""
BODY_BYTES = 220_000
PIECE_BYTES = 100
"""Bytes that a slow sender sends per turn."""


@dataclass
class Clients:
    """Slow clients of one kind.

    sockets: those whose connection is still open.
    body: the rest of the request that each sends in pieces; empty: they read instead.
    closed: connections that the server has closed.
    moved: bytes that all clients together have read or sent since the start.
    """

    sockets: list[socket.socket]
    body: bytes = b""
    closed: int = 0
    moved: int = 0

    def turn(self) -> None:
        """Let each client read one byte, or send one piece."""
        for client in list(self.sockets):
            try:
                moved = client.send(self.body[:PIECE_BYTES]) if self.body else len(client.recv(1))
            except BlockingIOError:
                continue
            except OSError:
                moved = 0
            if moved:
                self.moved += moved
            else:
                self.closed += 1
                self.sockets.remove(client)
                client.close()


@contextlib.contextmanager
def readers(url: str, count: int) -> Iterator[Clients]:
    """Clients that ask for a stream, and read it byte by byte."""
    body = {"model": "simulated", "stream": True, "max_tokens": STREAM_EVENTS,
            "messages": [{"role": "user", "content": "Tell me everything."}]}  # fmt: skip
    with _connected(url, count, request(urlsplit(url).netloc, json.dumps(body).encode())) as sockets:
        yield Clients(sockets)


@contextlib.contextmanager
def senders(url: str, count: int) -> Iterator[Clients]:
    """Clients that announce a large body, and send it in pieces."""
    body = b"x" * BODY_BYTES
    head = request(urlsplit(url).netloc, body)[: -len(body)]
    with _connected(url, count, head) as sockets:
        yield Clients(sockets, body)


@contextlib.contextmanager
def _connected(url: str, count: int, first: bytes) -> Iterator[list[socket.socket]]:
    address = urlsplit(url)
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            client = socket.socket()
            sockets.append(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            client.settimeout(20.0)
            client.connect((address.hostname or "127.0.0.1", address.port or 80))
            client.sendall(first)
            client.setblocking(False)
        yield sockets
    finally:
        for client in sockets:
            client.close()
