"""Compare one engine process that has all cores with several that divide them, on one machine, in one run.

    python benchmarks/replicas.py [--processes 2] [--streams 8,16] [--repeats 5] [--model FOLDER]
                                  [--parts speed,memory]

Without --model it is the checkpoint with random weights and the shape of a Qwen2.5-VL with 0.5 B parameters.
One server has one engine process (`--engine-process on`) with as many threads as cores, the other several
(`--data-parallel`) with the same cores. Both are loaded, and take turns, so that other work on the machine
disturbs both alike. So many streams ask at once, and each has a question of its own:

  decode    a short question and 64 tokens of answer: tokens per second of all answers together
  image     an image of its own and 4 tokens of answer: images per second

Ratios are medians divided by the medians of the server with one process. "ms" is processor time of all
engine processes per token or image, which other work on the machine disturbs less than the rates. The memory
is the proportional set size (PSS) of all engine processes after some answers, in which shared pages are
counted once: of one process, of several that share their weights, and of as many servers that share nothing.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from PIL import Image as Pillow

from checkpoint import write_checkpoint

NUMBERS = count()
SIDE = 336
LOAD_S = 600.0
WORKLOADS = {"decode": 64, "image": 4}
"""Tokens of an answer, by workload."""


@dataclass(frozen=True)
class Server:
    pid: int
    url: str

    def ask(self, content: Any, tokens: int) -> None:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens}
        data = json.dumps(body | {"ignore_eos": True, "temperature": 0}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", data, headers)
        with urllib.request.urlopen(request, timeout=LOAD_S) as answer:
            if json.load(answer)["usage"]["completion_tokens"] != tokens:
                raise RuntimeError("an answer is too short")

    def engines(self) -> list[int]:
        children = Path(f"/proc/{self.pid}/task").glob("*/children")
        pids = [int(pid) for path in children for pid in path.read_text().split()]
        return [
            pid for pid in pids if b"fovea.engine.process.host" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def seconds(self) -> float:
        """Processor time of all engine processes so far."""
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.engines()]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")

    def pss_mib(self) -> float:
        """MiB of all engine processes."""
        texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in self.engines()]
        lines = [line.split() for text in texts for line in text.splitlines()]
        return sum(int(line[1]) for line in lines if line[0] == "Pss:") / 1024


@contextlib.contextmanager
def serving(model: str, *words: str) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "fovea.cli.main", "serve", model, "--port", str(port)]
    options = "--kv-cache-mib", "256", "--speculate", "off", "--log-level", "warning"
    process = subprocess.Popen([*command, *options, *words])
    server = Server(process.pid, f"http://127.0.0.1:{port}")
    try:
        end = time.monotonic() + LOAD_S
        while not _is_ready(server.url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the server did not start")
            time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/ready", timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


def content(workload: str) -> Any:
    """Return a question that no other request has."""
    number = next(NUMBERS)
    text = f"{number}: please tell me about the number {number} and about {number + 1}."
    if workload == "decode":
        return text
    out = io.BytesIO()
    Pillow.new("RGB", (SIDE, SIDE), (number % 256, number // 256 % 256, 7)).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]


def rate(server: Server, workload: str, streams: int, rounds: int) -> tuple[float, float]:
    """Return tokens or images per second, and milliseconds of processor time for each.

    Each stream asks again as soon as it has its answer.
    """
    tokens = WORKLOADS[workload]
    questions = [content(workload) for _ in range(streams * rounds)]
    with ThreadPoolExecutor(streams) as executor:
        started, used = time.perf_counter(), server.seconds()
        list(executor.map(lambda question: server.ask(question, tokens), questions))
        seconds, used = time.perf_counter() - started, server.seconds() - used
    units = len(questions) * (tokens if workload == "decode" else 1)
    return units / seconds, 1000 * used / units


def measure_speed(
    model: str, processes: int, streams: Sequence[int], repeats: int, rounds: int
) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    with (
        serving(model, "--engine-process", "on", "--threads", str(cores)) as one,
        serving(model, "--data-parallel", str(processes)) as several,
    ):
        servers = {"one": one, "several": several}
        for server in servers.values():
            for workload in WORKLOADS:
                rate(server, workload, 2 * processes, 1)
        samples: dict[str, list[float]] = {}
        for _ in range(repeats):
            for workload in WORKLOADS:
                for number in streams:
                    for name, server in servers.items():
                        per_second, ms = rate(server, workload, number, rounds)
                        samples.setdefault(f"{workload} {number} {name}", []).append(per_second)
                        samples.setdefault(f"{workload} {number} {name} ms", []).append(ms)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    print(f"{'':15} {'1 process':>12} {f'{processes} processes':>12} {'ratio':>7}")
    for workload in WORKLOADS:
        for number in streams:
            for unit in ("", " ms"):
                first, second = (medians[f"{workload} {number} {name}{unit}"] for name in servers)
                print(f"{workload:8} {number:3}{unit:4} {first:12.2f} {second:12.2f} {second / first:7.2f}")
    return {"medians": medians, "samples": samples}


def measure_memory(model: str, processes: int) -> dict[str, float]:
    def settled(servers: Sequence[Server]) -> float:
        for server in servers:
            rate(server, "decode", 2 * processes, 2)
        return sum(server.pss_mib() for server in servers)

    figures = {}
    with serving(model, "--engine-process", "on", "--threads", "1") as server:
        figures["1 process"] = settled([server])
    with serving(model, "--data-parallel", str(processes)) as server:
        figures[f"{processes} processes, shared"] = settled([server])
    with contextlib.ExitStack() as stack:
        words = "--engine-process", "on", "--threads", "1"
        servers = [stack.enter_context(serving(model, *words)) for _ in range(processes)]
        figures[f"{processes} processes, not shared"] = settled(servers)
    for name, mib in figures.items():
        print(f"{name:28} {mib:8.0f} MiB")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--streams", default="8,16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="")
    parser.add_argument("--parts", default="speed,memory")
    args = parser.parse_args()
    model = args.model or str(write_checkpoint(Path("/tmp/fovea-bench/qwen2.5-vl-0.5b-random")))
    streams = [int(number) for number in args.streams.split(",")]
    result: dict[str, Any] = {}
    if "memory" in args.parts:
        result["memory_mib"] = measure_memory(model, args.processes)
    if "speed" in args.parts:
        result |= measure_speed(model, args.processes, streams, args.repeats, args.rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
