"""One HTTP request and its response, as the middleware sees them: bytes, status and times."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from fovea.access.bucket import TokenBucket
from fovea.access.log import request_id
from fovea.observe.tracing.request import RequestEnd
from fovea.server.clients import Caller

LONGEST_PATH = 200
LONGEST_CLIENT = 64
"""Bytes of a client's name that tell it from others."""


class Exchange:
    """Counts the bytes of one request and its response, and adds the headers that every response has.

    caller: who sent the request.
    status: status of the response; None: none was sent yet.
    """

    def __init__(self, scope: Scope, caller: Caller | None = None) -> None:
        """caller: None: it is found out by the request's key."""
        # If a name occurs twice, the first header counts.
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self.caller = caller or Caller(
            request_id=request_id(self.headers.get(b"x-request-id", b"")),
            speaks_for=self.headers.get(b"x-fovea-client", b"")[:LONGEST_CLIENT].decode("latin-1"),
        )
        self.status: int | None = None
        self._scope = scope
        self._arrival = time.time()
        self._started = time.perf_counter()
        self._first_byte: float | None = None
        self._streams = False
        self._bytes_in = 0
        self._bytes_out = 0

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self._started

    @property
    def address(self) -> str:
        """Address of the client, without its port."""
        client = self._scope.get("client")
        return str(client[0]) if client else "-"

    def received(self, receive: Receive) -> Receive:
        """Return a `receive` that counts."""

        async def counted() -> Message:
            message = await receive()
            self._bytes_in += len(message.get("body", b""))
            return message

        return counted

    def sent(self, send: Send) -> Send:
        """Return a `send` that counts and adds headers."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self._first_byte = self.seconds
                headers = MutableHeaders(scope=message)
                self._streams = headers.get("content-type", "").startswith("text/event-stream")
                self._add_headers(headers)
            else:
                self._bytes_out += len(message.get("body", b""))
            await send(message)

        return counted

    def ended(self, route: str, status: int) -> RequestEnd:
        """Return what is known of the request now that its response is complete.

        route: path of its route, without parameters.
        """
        method, caller = self._scope["method"], self.caller
        return RequestEnd(
            time.perf_counter(), caller.request_id, method, route, status, caller.client.name, self._streams
        )

    def line(self, status: int, trace_id: str) -> dict[str, Any]:
        """The values of a line in the access log. The path has no query string, which may hold secrets.

        trace_id: "": the request belongs to no trace.
        """
        caller, first = self.caller, self._first_byte
        return {
            "time": datetime.fromtimestamp(self._arrival, UTC).isoformat(timespec="milliseconds"),
            "id": caller.request_id,
            **({"trace_id": trace_id} if trace_id else {}),
            "client": self.address,
            "key": caller.client.name,
            "method": self._scope["method"][:16],
            "path": self._scope["path"][:LONGEST_PATH],
            "status": status,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
            "prompt_tokens": caller.prompt_tokens,
            "completion_tokens": caller.completion_tokens,
            "ms": round(1000 * self.seconds, 1),
            "first_byte_ms": None if first is None else round(1000 * first, 1),
        }

    def _add_headers(self, headers: MutableHeaders) -> None:
        headers["x-request-id"] = self.caller.request_id
        if self._scope["path"].startswith("/v1/messages"):  # Anthropic's name of it
            headers["request-id"] = self.caller.request_id
        client = self.caller.client
        for noun, bucket in (("requests", client.requests), ("tokens", client.tokens)):
            if bucket is not None:
                _add_limit(headers, noun, bucket)


def _add_limit(headers: MutableHeaders, noun: str, bucket: TokenBucket) -> None:
    headers[f"x-ratelimit-limit-{noun}"] = str(bucket.per_minute)
    headers[f"x-ratelimit-remaining-{noun}"] = str(bucket.remaining)
    headers[f"x-ratelimit-reset-{noun}"] = duration(bucket.reset_s)


def duration(seconds: float) -> str:
    """Write a duration as OpenAI does in its headers: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(1000 * seconds)}ms"
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
