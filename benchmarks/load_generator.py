"""Measure how much load the client of `fovea bench` can send, and what one request costs it.

    python benchmarks/load_generator.py [--requests 2000] [--repeats 3]

A process of its own answers every request at once with fixed bytes; the client asks it from many coroutines.

  whole    a complete JSON answer (an upload of an image)
  short    a stream of one event
  burst    a stream of 100 events, which the server writes all at once
  steady   a stream of 100 events, one every 10 ms: a decoder of 100 tokens per second
  crowd    many such streams, more than a client can follow at that rate

The columns are requests per second, the client's processor milliseconds per request, and the share of one
core that the client used. Each is the median of the repeats. Below a share of about 90%, the server or its
interval was the limit, and only the processor time says something about the client. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from fovea.bench import session
from fovea.bench.client import Client
from fovea.bench.measure import BenchRequest
from fovea.bench.settings import Target
from fovea.bench.workloads import closed_loop

EVENTS = 100
INTERVAL_S = 0.01


@dataclass(frozen=True)
class Case:
    """One kind of answer.

    clients: requests that run at the same time.
    share: number of requests, as a share of --requests.
    """

    name: str
    clients: int
    share: float


CASES = (
    Case("whole", 32, 1.0),
    Case("short", 32, 1.0),
    Case("burst", 32, 0.25),
    Case("steady", 8, 0.02),
    Case("crowd", 400, 0.4),
)


@dataclass(frozen=True)
class Row:
    """The figures of one case: requests per second, processor time per request, and share of one core."""

    name: str
    clients: int
    requests: int
    per_s: float
    cpu_ms: float
    core: float


def chunk(text: str) -> bytes:
    """One event of a stream, as one HTTP chunk."""
    payload = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": "fixed"}
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    return framed(json.dumps({**payload, "choices": [choice]}, separators=(",", ":")))


def framed(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def end(events: int) -> bytes:
    """The last events of a stream and the end of the HTTP body."""
    usage = {"prompt_tokens": 8, "completion_tokens": events, "total_tokens": events + 8}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": usage}
    return framed(json.dumps(last)) + framed("[DONE]") + b"0\r\n\r\n"


def whole(value: object) -> bytes:
    body = json.dumps(value).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = chunk(" word")
WHOLE = whole({"url": "fovea-image://0123456789abcdef", "tokens": 256})
SHORT = HEAD + PIECE + end(1)
BURST = HEAD + PIECE * EVENTS + end(EVENTS)


class Fixed(asyncio.Protocol):
    """A connection that answers every request with fixed bytes, by the first part of the request's path."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass of it

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, mark, body = self._data.partition(b"\r\n\r\n")
        if not mark:
            return
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if len(body) < int(length or 0):
            return
        self._data = body[int(length or 0) :]
        self.answer(head.split(b"/", 2)[1].decode())

    def answer(self, kind: str) -> None:
        if kind in ("steady", "crowd"):
            self._transport.write(HEAD)
            self.stream(EVENTS)
        else:
            self._transport.write({"whole": WHOLE, "short": SHORT, "burst": BURST}[kind])

    def stream(self, left: int) -> None:
        if left:
            self._transport.write(PIECE)
            self._loop.call_later(INTERVAL_S, self.stream, left - 1)
        else:
            self._transport.write(end(EVENTS))


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Fixed, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def measure(url: str, case: Case, requests: int) -> Row:
    """Send requests of one case, `case.clients` at a time."""
    async with Client(Target(f"{url}/{case.name}", model="fixed")) as client:
        request = BenchRequest(({"role": "user", "content": "x " * 400},), EVENTS)

        async def ask() -> None:
            sample = await client.send(request)
            assert sample.failure is None, sample.failure

        async def upload() -> None:
            await client.send_image("data:image/png;base64," + "A" * 800)

        call: Callable[[], Awaitable[None]] = upload if case.name == "whole" else ask
        await closed_loop([call] * min(case.clients, requests), case.clients)  # opens the connections
        wall, cpu = time.perf_counter(), time.process_time()
        await closed_loop([call] * requests, case.clients)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Row(case.name, case.clients, requests, requests / wall, 1e3 * cpu / requests, cpu / wall)


def median(rows: list[Row]) -> Row:
    first = rows[0]
    per_s, cpu_ms, core = (
        statistics.median(getattr(row, name) for row in rows) for name in ("per_s", "cpu_ms", "core")
    )
    return Row(first.name, first.clients, first.requests, per_s, cpu_ms, core)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--requests", type=int, default=2000, help="requests of the short cases")
    arguments.add_argument("--repeats", type=int, default=3, help="measurements per case")
    arguments.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.serve:
        session.run(serve())
        return
    server = subprocess.Popen([sys.executable, str(Path(__file__)), "--serve"], stdout=subprocess.PIPE)
    rows = []
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        print(f"{'':8}{'clients':>8}{'requests/s':>12}{'cpu ms':>9}{'core':>7}", flush=True)
        for case in CASES:
            requests = max(1, int(args.requests * case.share))
            row = median([session.run(measure(url, case, requests)) for _ in range(args.repeats)])
            rows.append(row)
            print(
                f"{row.name:8}{row.clients:>8}{row.per_s:>12.1f}{row.cpu_ms:>9.3f}{row.core:>7.0%}",
                flush=True,
            )
    finally:
        server.terminate()
        server.wait()
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
