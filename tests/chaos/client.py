"""Sends one request on a connection of its own and tells exactly how its answer ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Literal

import h11

Ending = Literal["complete", "cut", "timeout", "unreachable", "cancelled", "damaged"]
CHUNK = 65536


@dataclass(slots=True)
class Outcome:
    """The answer to one request, as the client has seen it.

    begin_s, end_s: seconds of the client's clock.
    ending: complete: the whole body has arrived; cut: the connection ended before; damaged: the bytes are not
        HTTP; unreachable: it could not be connected to; timeout: the client's own time was over.
    status: 0: no answer began. peer: the client's own port; 0: none.
    """

    begin_s: float
    end_s: float = 0.0
    ending: Ending = "cut"
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    peer: int = 0


async def send(
    port: int,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes,
    timeout_s: float,
    leave_s: float = 0.0,
) -> Outcome:
    """Send a request to a loopback port. leave_s: the client leaves after so many seconds; 0: it stays."""
    outcome = Outcome(time.monotonic())
    try:
        async with asyncio.timeout(min(timeout_s, leave_s) if leave_s else timeout_s):
            await _exchange(port, method, path, headers, body, outcome)
    except TimeoutError:
        outcome.ending = "cancelled" if leave_s else "timeout"
    except h11.RemoteProtocolError:
        outcome.ending = "damaged"
    except OSError:
        outcome.ending = "cut" if outcome.peer else "unreachable"
    outcome.end_s = time.monotonic()
    return outcome


async def _exchange(
    port: int, method: str, path: str, headers: dict[str, str], body: bytes, outcome: Outcome
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        outcome.peer = writer.get_extra_info("sockname")[1]
        line = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        all_headers = [("host", "localhost"), ("content-length", str(len(body))), ("connection", "close")]
        head = h11.Request(method=method, target=path, headers=[*all_headers, *headers.items()])
        writer.write(line.send(head) or b"")
        if body:
            writer.write(line.send(h11.Data(body)) or b"")
        line.send(h11.EndOfMessage())
        sending = asyncio.ensure_future(writer.drain())
        try:
            await _receive(line, reader, outcome)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    finally:
        writer.transport.abort()


def _end(line: h11.Connection, outcome: Outcome) -> None:
    """Note the end of the connection: it completes a body without a length, and cuts all others."""
    with contextlib.suppress(h11.RemoteProtocolError):
        if isinstance(line.next_event(), h11.EndOfMessage):
            outcome.ending = "complete"


async def _receive(line: h11.Connection, reader: asyncio.StreamReader, outcome: Outcome) -> None:
    parts: list[bytes] = []
    try:
        while True:
            event = line.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(CHUNK)
                line.receive_data(data)
                if not data:
                    _end(line, outcome)
                    return
            elif isinstance(event, h11.Response):
                outcome.status = event.status_code
                outcome.headers = {
                    name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers
                }
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                outcome.ending = "complete"
                return
            elif isinstance(event, h11.ConnectionClosed):
                return
    finally:
        outcome.body = b"".join(parts)
