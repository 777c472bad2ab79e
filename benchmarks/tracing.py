"""Measure what traces cost: throughput and processor time of a server with and without them, in one run.

    python benchmarks/tracing.py [--rounds 8] [--requests 120]

Four servers with the bundled model run side by side: two without traces, whose difference is the error of the
measurement, one that sends them to a collector, and one whose collector is dead. They are asked in turn, so
that a change of the machine's speed hits all of them alike. No answer comes from a cache: the texts differ.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.servers import free_port, started  # noqa: E402

Figures = dict[str, dict[str, list[float]]]
CLIENTS = 8
READY_S = 120.0


@contextlib.contextmanager
def sink() -> Iterator[str]:
    """A collector in a process of its own that takes everything and keeps nothing."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as home,
        started([sys.executable, __file__, "--sink", str(port)], [port], Path(home) / "log"),
    ):
        yield f"http://127.0.0.1:{port}"


def run_sink(port: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


@contextlib.contextmanager
def server(endpoint: str) -> Iterator[tuple[str, int]]:
    """A server with the bundled model. Yields its URL and its process id."""
    port = free_port()
    environment = {**os.environ, "FOVEA_OTLP_ENDPOINT": endpoint}
    with tempfile.TemporaryDirectory() as home:
        log = (Path(home) / "log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "fovea.cli.main", "serve", "--port", str(port), "--threads", "1",
             "--lame-duck-s", "0", "--log-level", "error"],
            env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait()


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/ready") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.2)
    raise RuntimeError(f"{url} is not ready")


async def load(session: aiohttp.ClientSession, url: str, requests: int, seed: int) -> float:
    """Ask with CLIENTS clients in a closed loop. Returns requests per second."""
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            body = {
                "messages": [{"role": "user", "content": f"what is {seed} and {number}?"}],
                "max_tokens": 16, "ignore_eos": True, "stream": True, "temperature": 0,
            }  # fmt: skip
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                await answer.read()
                assert answer.status == 200

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return requests / (time.perf_counter() - began)


def cpu_seconds(pid: int) -> float:
    """Processor seconds of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    servers: dict[str, tuple[str, int]], rounds: int, requests: int
) -> dict[str, dict[str, list[float]]]:
    figures: dict[str, dict[str, list[float]]] = {name: {"rate": [], "cpu": []} for name in servers}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for url, _ in servers.values():
            await ready(session, url)
            await load(session, url, requests, -1)
        order = list(servers)
        for number in range(rounds):
            for name in order if number % 2 else reversed(order):
                url, pid = servers[name]
                before = cpu_seconds(pid)
                rate = await load(session, url, requests, number)
                await asyncio.sleep(1.5)  # the spans of this round are exported within it
                figures[name]["rate"].append(rate)
                figures[name]["cpu"].append((cpu_seconds(pid) - before) / requests * 1000)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--sink", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sink:
        run_sink(args.sink)
        return
    with sink() as collector, contextlib.ExitStack() as stack:
        dead = "http://127.0.0.1:9"
        endpoints = {"off": "", "off again": "", "collector": collector, "dead collector": dead}
        servers = {name: stack.enter_context(server(each)) for name, each in endpoints.items()}
        figures = asyncio.run(measure(servers, args.rounds, args.requests))
    print(f"{'traces':16}{'requests/s':>12}{'to off':>10}{'cpu ms/request':>17}{'to off':>10}")
    result = {}
    for name, each in figures.items():
        rates = [a / b for a, b in zip(each["rate"], figures["off"]["rate"], strict=True)]
        cpus = [a / b for a, b in zip(each["cpu"], figures["off"]["cpu"], strict=True)]
        rate, cpu = statistics.median(rates), statistics.median(cpus)
        print(
            f"{name:16}{statistics.median(each['rate']):12.1f}{rate:10.3f}"
            f"{statistics.median(each['cpu']):17.2f}{cpu:10.3f}"
        )
        result[name] = {"rate_ratio": round(rate, 4), "cpu_ratio": round(cpu, 4)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
