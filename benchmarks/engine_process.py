"""Measure what it costs that the server and the engine share one Python lock (GIL).

    python benchmarks/engine_process.py [--streams 256] [--step-ms 8] [--host-ms 2] [--seconds 3]

Clients in a process of their own read many streams at once. The engine's loop, scheduler, tokens, text and
HTTP are the real ones; only the device is simulated. It computes a step in --step-ms without Python, and
one step after the other, while the host works. --host-ms is processor time that a real runner's launch and
choice of tokens add in the engine's thread; the simulated one has nothing like them.

  waits, one     the next step is launched when the tokens of the one before are sent; one process
  waits, two     a process for the engine and one for the server (`fovea serve --engine-process on`)
  ahead, ...     the next step is launched while the device still computes the one before (as on CUDA)

The modes take turns in each repeat. For every mode a row of medians tells:

  begun      streams that had a token at the end. A server that is behind answers no new request
  tokens_per_s, share   tokens per second that clients got, and their share of what the device can compute
  late_ms    milliseconds from the end of a step to the end of the next one, beyond --step-ms: mean
  waited_ms  the part of them in which the engine's thread waited for the Python lock, mean: that is neither
             its own processor time, nor sleep, nor a wait for a processor that other threads had
  engine_ms  processor time of the engine's thread per step
  texts_ms   processor time of the other threads of an engine's process of its own, per step
  http_ms    processor time of the other threads of the server's process, per step whose tokens it sent
  lock_ms    the most processor time per step of one process: if it is above --step-ms, the device waits, or
             clients fall behind, however many processors there are
  token_us   processor time of server and engine per token, in microseconds
  starved    processors that threads of server and engine were ready to use, but did not get: how much other
             work disturbed the run. Times by the clock are worth little if it is not small

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODES = ("waits, one", "waits, two", "ahead, one", "ahead, two")
BEGIN_S = 15.0
"""Seconds that streams have to begin. Those that have not begun by then are not waited for."""
PROMPT = "Count from one to a thousand, please."


class Device:
    """Computes steps one after the other, each in a fixed time, without Python."""

    def __init__(self, executor: Any, filler: Any, step_s: float, host_s: float, ahead: bool) -> None:
        self.runs_ahead = ahead
        self._executor = executor
        self._filler = filler
        self._step_s, self._host_s = step_s, host_s
        self._free = 0.0
        self.steps: list[tuple[float, int, float, float]] = []
        self._slept = 0.0

    encoding, slice_s = False, 0.0

    def add(self, seq: Any, inputs: Any) -> Any:
        self._filler.add(seq, inputs.choice)
        return self._executor.add(seq, inputs)

    def remove(self, seq: Any) -> None:
        self._filler.remove(seq)
        self._executor.remove(seq)

    def late(self) -> None:
        return None

    def execute(self, plan: Any, encode_s: float) -> Any:
        return self.finish(self.launch(plan, encode_s))

    def launch(self, plan: Any, encode_s: float) -> Any:
        began = time.thread_time()
        while time.thread_time() - began < self._host_s:
            pass
        self._free = max(self._free, time.monotonic()) + self._step_s
        return plan, encode_s, self._free

    def follow(self, launched: Any, plan: Any) -> Any:
        return self.launch(plan, 0.0)

    def finish(self, launched: Any) -> Any:
        plan, encode_s, due = launched
        began = time.monotonic()
        if due > began:
            self._slept += due - began
            time.sleep(due - began)
        result = self._executor.execute(plan, encode_s)
        result.seconds = self._step_s
        self.steps.append((time.monotonic(), len(plan.work), time.thread_time(), self._slept))
        return result


def make_engine(args: argparse.Namespace, ahead: bool) -> Any:
    """Return an engine that prints its steps, and its thread, when it is closed."""
    from fovea.engine.config import EngineConfig
    from fovea.engine.simulate.executor import CostExecutor
    from fovea.engine.simulate.serving import SimulatedEngine
    from fovea.planner.cost import CostModel

    class Measured(SimulatedEngine):
        async def close(self, drain_s: float = 0.0) -> None:
            if self.status == "ready":
                thread = self.loop._thread.native_id
                print(json.dumps({"thread": thread, "steps": self.device.steps}), flush=True)
            await super().close(drain_s)

        def _executor(self, embeddings: Any) -> Any:
            executor = CostExecutor(self.cost, embeddings, self.filler.token)
            self.device = Device(executor, self.filler, args.step_ms / 1e3, args.host_ms / 1e3, ahead)
            return self.device

    config = EngineConfig.of(max_running=args.streams, max_queue=0, pace=0.0, target_itl_ms=0)
    return Measured(config, CostModel(step_s=args.step_ms / 1e3, decode_s=0, context_s=0))


@dataclass(frozen=True)
class MeasuredSource:
    """Makes the measured engine, in the server's process or in its own."""

    args: argparse.Namespace
    ahead: bool

    def load(self) -> Any:
        return make_engine(self.args, self.ahead)


def run_server(args: argparse.Namespace) -> None:
    from engine_process import MeasuredSource  # not of __main__, which is another module in the other process
    from fovea.engine.process.client import RemoteEngine
    from fovea.http.settings import HttpSettings
    from fovea.server.app import create_app
    from fovea.server.run import serve
    from fovea.server.settings import ServerSettings

    source: Any = MeasuredSource(args, args.mode.startswith("ahead"))
    engine: Any = source.load() if args.mode.endswith("one") else RemoteEngine(source)
    pids = [os.getpid(), *([engine.pid] if args.mode.endswith("two") else [])]

    def start() -> None:
        print(json.dumps({"pids": pids}), flush=True)

    http = HttpSettings(max_connections=args.streams + 8, max_connections_per_address=args.streams + 8)
    serve(create_app(engine, ServerSettings(http=http)), "127.0.0.1", args.port, on_start=start)


# The clients.


class Reader(asyncio.Protocol):
    """A client that counts the events of one stream."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self._crowd = crowd
        self._number = number
        self.events = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": f"{self._number}: {PROMPT}"}],
                "stream": True,
                "max_tokens": 3000,
                "temperature": 0,
                "ignore_eos": True,
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        transport.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 "):
            head, _, data = data.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                self._crowd.fail(head.decode() + data.decode())
        begun, self.events = self.events > 0, self.events + data.count(b" ") - data.count(b"data: ")
        if self.events and not begun:
            self._crowd.begin()

    def connection_lost(self, error: Any) -> None: ...


class Crowd:
    def __init__(self, streams: int) -> None:
        self._missing = streams
        self.all_begun = asyncio.get_running_loop().create_future()
        self.readers = [Reader(self, number) for number in range(streams)]

    def begin(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.all_begun.set_result(None)

    def fail(self, answer: str) -> None:
        if not self.all_begun.done():
            self.all_begun.set_exception(RuntimeError(answer))

    @property
    def events(self) -> int:
        return sum(reader.events for reader in self.readers)


def threads(pids: list[int]) -> dict[int, tuple[float, float]]:
    """Processor time and starvation of every thread of these processes."""
    found = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").iterdir():
            values = (path / "schedstat").read_text().split()
            found[int(path.name)] = int(values[0]) / 1e9, int(values[1]) / 1e9
    return found


async def measure(args: argparse.Namespace, mode: str) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, *sys.argv, "--mode", mode, "--role", "server", "--port", str(port)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, limit=2**26)
    assert process.stdout is not None
    about = json.loads(await process.stdout.readline())
    crowd, loop = Crowd(args.streams), asyncio.get_running_loop()
    for reader in crowd.readers:
        await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)
    with suppress(TimeoutError):
        await asyncio.wait_for(crowd.all_begun, BEGIN_S)
    await asyncio.sleep(0.5)
    about["tids"] = [list(threads([pid])) for pid in reversed(about["pids"])]
    before, began, events = threads(about["pids"]), time.monotonic(), crowd.events
    await asyncio.sleep(args.seconds)
    after, ended, events = threads(about["pids"]), time.monotonic(), crowd.events - events
    for reader in crowd.readers:
        reader._transport.abort()
    process.send_signal(signal.SIGTERM)
    last = json.loads(await process.stdout.readline())
    steps, engine = last["steps"], last["thread"]
    await process.wait()
    steps = [step for step in steps if began <= step[0] <= ended]
    count, seconds = len(steps), ended - began
    used = {tid: [b - a for a, b in zip(before.get(tid, (0, 0)), after[tid], strict=True)] for tid in after}
    loops = [sum(used[tid][0] for tid in tids if tid != engine and tid in used) for tids in about["tids"]]
    spans = [b[0] - a[0] for a, b in zip(steps, steps[1:], strict=False)]
    slept = steps[-1][3] - steps[0][3]
    own = 1e3 * used[engine][0] / count
    # Tokens wait in queues, and the server may be behind: its work is counted by the tokens that it has sent.
    texts, http = (1e3 * loops[0] / count, 1e3 * loops[-1] / events * args.streams)
    waited = steps[-1][0] - steps[0][0] - (steps[-1][2] - steps[0][2]) - slept
    waited -= used[engine][1] * (steps[-1][0] - steps[0][0]) / seconds
    return {
        "begun": sum(reader.events > 0 for reader in crowd.readers),
        "tokens_per_s": events / seconds,
        "share": events / seconds * args.step_ms / 1e3 / args.streams,
        "late_ms": 1e3 * statistics.mean(spans) - args.step_ms,
        "waited_ms": 1e3 * waited / count,
        "engine_ms": own,
        "texts_ms": texts if len(loops) > 1 else 0.0,
        "http_ms": http,
        "lock_ms": max(own + texts, http) if len(loops) > 1 else own + http,
        "token_us": 1e3 * (own + http + (texts if len(loops) > 1 else 0.0)) / args.streams,
        "starved": sum(entry[1] for entry in used.values()) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--host-ms", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    for name in ("--role", "--mode"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "server":
        run_server(args)
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(args.repeats):
        for mode in rows:
            rows[mode].append(asyncio.run(measure(args, mode)))
    medians = {
        mode: {name: statistics.median(row[name] for row in found) for name in found[0]}
        for mode, found in rows.items()
    }
    columns = list(medians[MODES[0]])
    print(f"{'':12}", *(f"{name:>12}" for name in columns))
    for mode, row in medians.items():
        print(f"{mode:12}", *(f"{row[name]:12.2f}" for name in columns))
    print(json.dumps({"medians": medians, "runs": rows}))


if __name__ == "__main__":
    main()
