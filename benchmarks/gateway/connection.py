"""One connection of the load generator: it sends prepared bytes and checks each answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httptools

DONE = b"data: [DONE]\n\n"


class Connection(asyncio.Protocol):
    """A kept-alive connection with at most one request at a time.

    `on_done(connection, error)` is called at the end of each answer; the error is empty for a good one. After
    an error the connection is closed.
    """

    def __init__(self, on_done: Callable[[Connection, str], None]) -> None:
        self._on_done = on_done
        self._transport: Any = None
        self._parser: Any = None
        self._parts: list[bytes] = []
        self._events = 0
        self.began = self.first = 0.0
        self.busy = False
        self.backend = b""
        self.body = b""

    def send(self, data: bytes, events: int, began: float) -> None:
        """Send a whole request. events: data events that its stream must have; 0: a complete answer."""
        self._parser, self._parts, self._events = httptools.HttpResponseParser(self), [], events
        self.began, self.first, self.busy, self.backend = began, 0.0, True, b""
        self._transport.write(data)

    def close(self) -> None:
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.busy:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.busy:
            self._end("connection closed")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-fovea-backend-id":
            self.backend = value

    def on_body(self, data: bytes) -> None:
        if not self.first:
            self.first = time.perf_counter()
        self._parts.append(data)

    def on_message_complete(self) -> None:
        status, body = self._parser.get_status_code(), b"".join(self._parts)
        self.body = body
        if status != 200:
            self._end(f"status {status}")
        elif self._events and not (body.endswith(DONE) and body.count(b"data: ") == self._events + 1):
            self._end("events are missing")
        elif not self._events and b'"choices"' not in body:
            self._end("not an answer")
        else:
            self._end("")

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _end(self, error: str) -> None:
        self.busy = False
        if error:
            self.close()
        self._on_done(self, error)


def request(host: str, body: bytes, path: str = "/v1/chat/completions") -> bytes:
    """The bytes of a POST request. host: name and port of the server."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\nuser-agent: fovea-load\r\naccept: */*\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
