"""Simulate OpenAI-compatible engines that answer at once, so that only a proxy in front of them costs time.

    python benchmarks/gateway/backend.py --port 9001 --port 9002 [--gap-ms 2] [--mode stall --after 10]

Every port is a backend of its own, with its own name, counters and behaviour. One thread serves them all.
A stream has as many events as `max_tokens` of the request asks for. How a backend fails is set with --mode,
or later with `POST /behaviour`; what it has received is read with `GET /counts`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import httptools
import uvloop
from simulated import (
    ANSWER,
    DONE,
    EVENTS,
    LAST,
    MODES,
    PAGES,
    WORD,
    Backend,
    Behaviour,
    event,
    is_true,
    number_of,
    usage,
)

BACKLOG = 2048


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection. A request that arrives before the last one is answered closes it."""

    def __init__(self, backend: Backend, loop: asyncio.AbstractEventLoop) -> None:
        self._backend, self._loop = backend, loop
        self._transport: Any = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._parts: list[bytes] = []
        self._events: list[bytes] = []
        self._sent = 0
        self._busy = self._paused = self._close_after = False
        self._timer: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._backend.counts.connections += 1
        self._backend.counts.open_connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._backend.counts.open_connections -= 1
        self._backend.counts.cut += self._busy
        self._busy = False
        if self._timer:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._busy and self._sent < len(self._events):
            self._next_event()

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if self._busy:
            self._transport.abort()
        self._parts, self._url = [], b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._close_after = not self._parser.should_keep_alive()
        body, path = b"".join(self._parts), self._url.partition(b"?")[0]
        if path == b"/v1/chat/completions" and self._parser.get_method() == b"POST":
            self._chat(body)
        elif path == b"/behaviour":
            self._set_behaviour(body)
        elif path == b"/counts":
            self._finish(self._backend.complete(200, json.dumps(asdict(self._backend.counts)).encode()))
        elif path in PAGES:
            self._finish(self._backend.complete(200, json.dumps(PAGES[path]).encode()))
        else:
            self._finish(self._backend.complete(404, b'{"error":{"message":"there is no such page"}}'))

    def _set_behaviour(self, body: bytes) -> None:
        try:
            self._backend.behaviour = replace(self._backend.behaviour, **json.loads(body))
        except (TypeError, ValueError) as error:
            refusal = json.dumps({"error": {"message": str(error)}}).encode()
            self._finish(self._backend.complete(400, refusal))
        else:
            self._finish(self._backend.complete(200, json.dumps(asdict(self._backend.behaviour)).encode()))

    def _chat(self, body: bytes) -> None:
        backend, behaviour = self._backend, self._backend.behaviour
        backend.counts.requests += 1
        backend.counts.body_bytes += len(body)
        self._busy = True
        extra = f"x-fovea-body-sha256: {hashlib.sha256(body).hexdigest()}\r\n" if backend.digest else ""
        if is_true(body, b'"stream"'):
            self._events = self._stream(body, extra)
            self._sent = 0
            start: Callable[[], None] = self._next_event
        else:
            self._events = []
            start = lambda: self._answer(extra)  # noqa: E731
        if behaviour.mode == "refuse":
            backend.counts.failures += 1
            refusal = b'{"error":{"message":"this backend refuses","code":"unavailable"}}'
            self._finish(backend.complete(behaviour.status, refusal, "retry-after: 1\r\n"))
        elif behaviour.first_ms:
            self._timer = self._loop.call_later(behaviour.first_ms / 1e3, start)
        else:
            start()

    def _answer(self, extra: str) -> None:
        if not self._fails(0):
            self._finish(self._backend.complete(200, ANSWER, extra))

    def _stream(self, body: bytes, extra: str) -> list[bytes]:
        """The writes of a stream: its head goes with the first event, and its end is the last write."""
        events = max(1, number_of(body, b'"max_tokens"', EVENTS))
        parts = [WORD] * (events - 1) + [LAST]
        if is_true(body, b'"include_usage"'):
            parts.append(event(choices=[], usage=usage(events)))
        head = self._backend.head(200, "text/event-stream", f"cache-control: no-cache\r\n{extra}")
        parts[0] = head + b"transfer-encoding: chunked\r\n\r\n" + parts[0]
        return [*parts, DONE]

    def _next_event(self) -> None:
        """Write an event, and plan the next one: after the gap, or in the next turn of the loop."""
        if self._paused or self._fails(self._sent):
            return
        self._transport.write(self._events[self._sent])
        self._sent += 1
        self._backend.counts.events += 1
        if self._sent == len(self._events):
            self._finish(b"")
        elif gap_ms := self._backend.behaviour.gap_ms:
            self._timer = self._loop.call_later(gap_ms / 1e3, self._next_event)
        else:
            self._timer = self._loop.call_soon(self._next_event)

    def _fails(self, sent: int) -> bool:
        """Whether the answer ends here, after `sent` events, because it has to fail; reset it if so."""
        behaviour = self._backend.behaviour
        if behaviour.mode not in ("stall", "kill") or (self._events and sent < behaviour.after):
            return False
        self._backend.counts.failures += 1
        if behaviour.mode == "kill":
            self._busy = False
            self._transport.abort()
        return True

    def _finish(self, data: bytes) -> None:
        if data:
            self._transport.write(data)
        self._busy = False
        if self._close_after:
            self._transport.close()


async def serve(backends: Sequence[Backend], ports: Sequence[int]) -> list[asyncio.Server]:
    """Listen on a loopback port for each backend. Raises OSError if a port is taken."""
    loop = asyncio.get_running_loop()
    return [
        await loop.create_server(
            lambda backend=backend: Connection(backend, loop),  # type: ignore[misc]
            "127.0.0.1", port, backlog=BACKLOG, family=socket.AF_INET,
        )
        for backend, port in zip(backends, ports, strict=True)
    ]  # fmt: skip


async def _run(backends: Sequence[Backend], ports: Sequence[int]) -> None:
    await serve(backends, ports)
    print(json.dumps({"ports": list(ports)}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, action="append", required=True, help="once for each backend")
    parser.add_argument(
        "--digest", action="store_true", help="name the SHA-256 of every body in x-fovea-body-sha256"
    )
    parser.add_argument("--mode", choices=MODES, default="answer")
    parser.add_argument("--after", type=int, default=0, metavar="EVENTS", help="before a stall or a reset")
    parser.add_argument("--status", type=int, default=503, help="of refusals (default: %(default)s)")
    parser.add_argument("--gap-ms", type=float, default=0.0, help="between events (default: %(default)s)")
    parser.add_argument("--first-ms", type=float, default=0.0, help="before answers (default: %(default)s)")
    args = parser.parse_args()
    try:
        behaviour = Behaviour(args.mode, args.after, args.status, args.gap_ms, args.first_ms)
    except ValueError as error:
        parser.error(str(error))
    backends = [Backend(f"backend-{n}", behaviour, args.digest) for n in range(len(args.port))]
    uvloop.run(_run(backends, args.port))


if __name__ == "__main__":
    main()
