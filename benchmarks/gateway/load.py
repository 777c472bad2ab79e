"""Send chat requests to a server and measure its answers, with little processor time.

    python benchmarks/gateway/load.py --url http://127.0.0.1:9001 --kind text --seconds 5 [--rate 100]
    python benchmarks/gateway/load.py --orders  # JSON lines: orders on stdin, results on stdout

Closed loop: each connection sends its next request as soon as the last one is answered. Open loop (--rate):
requests start at fixed times, whether or not earlier ones are answered, and a late start counts as latency.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

import uvloop
from connection import Connection, request
from payloads import KINDS, bodies

PATIENCE_S = 20.0
"""Longest wait for the answers that are still missing at the end; later ones are errors."""
MOST_CONNECTIONS = 512


@dataclass(frozen=True)
class Order:
    """One measurement.

    url: base URL of the server.
    kind: name of the kind of request.
    seconds: time in which requests are started; ignored if `requests` is given.
    connections: connections of the closed loop; 0: as the kind says.
    rate: requests per second of the open loop; 0: closed loop.
    requests: number of requests; 0: as many as start in the time.
    """

    url: str
    kind: str = "text"
    seconds: float = 1.0
    connections: int = 0
    rate: float = 0.0
    requests: int = 0


@dataclass
class Outcome:
    """The answers of one measurement.

    requests: good answers.
    errors: how many requests failed, by reason.
    seconds: from the first request to the last answer.
    latencies_ms: of each good answer, from the request to its end.
    firsts_ms: of each good answer, from the request to the first byte of its body.
    backends: good answers by the backend that gave them.
    """

    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    firsts_ms: list[float] = field(default_factory=list)
    backends: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, object]:
        return {
            "requests": self.requests, "errors": self.errors, "seconds": self.seconds,
            "per_s": self.requests / self.seconds if self.seconds else 0.0,
            "p50_ms": percentile(self.latencies_ms, 0.5), "p99_ms": percentile(self.latencies_ms, 0.99),
            "first_p50_ms": percentile(self.firsts_ms, 0.5), "backends": self.backends,
        }  # fmt: skip


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of the values do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Load:
    """The requests of one order.

    data: the requests to send in turn, as bytes.
    events: events that each stream must have.
    """

    def __init__(self, order: Order, data: list[bytes], events: int, connections: int) -> None:
        self._order, self._events, self._width = order, events, connections
        self._data: Iterator[bytes] = itertools.cycle(data)
        address = urlsplit(order.url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 80
        self._loop = asyncio.get_running_loop()
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._started = 0
        self._waiting = 0
        self._stop_at = 0.0
        self._last = 0.0
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        began = time.perf_counter()
        self._stop_at = began + self._order.seconds
        if self._order.rate:
            await self._open_loop(began)
        else:
            for _ in range(self._width):
                self._start(time.perf_counter())
        try:
            while self._waiting or self._may_start():
                self._ended.clear()
                async with asyncio.timeout(max(0.0, self._stop_at - time.perf_counter()) + PATIENCE_S):
                    await self._ended.wait()
        except TimeoutError:
            self.outcome.errors["no answer in time"] += self._waiting
        self.outcome.seconds = max(self._last, self._stop_at if self._order.rate else 0.0) - began
        for connection in self._all:
            connection._on_done = lambda *_: None
            connection.close()
        return self.outcome

    async def _open_loop(self, began: float) -> None:
        total = self._order.requests or round(self._order.rate * self._order.seconds)
        for number in range(total):
            due = began + number / self._order.rate
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            self._start(due)
        self._stop_at = min(self._stop_at, time.perf_counter())

    def _may_start(self) -> bool:
        """Whether the closed loop goes on."""
        if self._order.rate:
            return False
        if self._order.requests:
            return self._started < self._order.requests
        return time.perf_counter() < self._stop_at

    def _start(self, due: float) -> None:
        """Start a request on an idle connection, or on a new one."""
        self._started += 1
        self._waiting += 1
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                connection.send(next(self._data), self._events, due)
                return
            self._all.discard(connection)
        if self._waiting > MOST_CONNECTIONS:
            self._finish("too many connections")
            return
        task = self._loop.create_task(self._connect(due))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, due: float) -> None:
        try:
            _, connection = await self._loop.create_connection(
                lambda: Connection(self._done), self._host, self._port
            )
        except OSError as error:
            await asyncio.sleep(0.01)  # a closed loop would turn without a pause
            self._finish(f"no connection: {type(error).__name__}")
            return
        self._all.add(connection)
        connection.send(next(self._data), self._events, due)

    def _done(self, connection: Connection, error: str) -> None:
        now = time.perf_counter()
        if not error:
            outcome = self.outcome
            outcome.requests += 1
            outcome.latencies_ms.append((now - connection.began) * 1e3)
            outcome.firsts_ms.append((connection.first - connection.began) * 1e3)
            outcome.backends[connection.backend.decode()] += 1
            self._idle.append(connection)
        else:
            self._all.discard(connection)
        self._finish(error)

    def _finish(self, error: str) -> None:
        self._waiting -= 1
        self._last = time.perf_counter()
        if error:
            self.outcome.errors[error] += 1
        if self._may_start():
            self._start(time.perf_counter())
        elif not self._waiting:
            self._ended.set()


class Generator:
    """A load generator that makes the bodies of each kind once."""

    def __init__(self) -> None:
        self._bodies: dict[str, list[bytes]] = {}

    async def carry_out(self, order: Order) -> Outcome:
        """Raises KeyError if there is no such kind."""
        kind = KINDS[order.kind]
        if order.kind not in self._bodies:
            self._bodies[order.kind] = bodies(kind)
        host = urlsplit(order.url).netloc
        data = [request(host, body) for body in self._bodies[order.kind]]
        return await Load(order, data, kind.events, order.connections or kind.connections).run()


async def _take_orders() -> None:
    generator, loop = Generator(), asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        outcome = await generator.carry_out(Order(**json.loads(line)))
        print(json.dumps(outcome.summary()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", action="store_true", help="read orders from stdin")
    parser.add_argument("--url", default="http://127.0.0.1:9001", help="(default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, default="text")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=0, help="(default: as the kind says)")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second; makes it an open loop")
    parser.add_argument("--requests", type=int, default=0, help="a number of requests instead of a time")
    args = parser.parse_args()
    if args.orders:
        uvloop.run(_take_orders())
        return
    order = Order(args.url, args.kind, args.seconds, args.connections, args.rate, args.requests)
    outcome = uvloop.run(Generator().carry_out(order))
    print(json.dumps({**asdict(order), **outcome.summary()}))


if __name__ == "__main__":
    main()
