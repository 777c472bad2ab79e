"""Measure what it costs that the server and the engine's thread share one Python lock (GIL).

    python benchmarks/engine_process.py [--streams 256] [--step-ms 8] [--host-ms 2] [--seconds 3] [--repeats 3]

Clients in a process of their own read many streams at once. The engine's loop, scheduler, tokens, text and
HTTP are the real ones; only the device is simulated. It computes a step in --step-ms without Python, and
one step after the other, while the host works. --host-ms is processor time that a real runner's launch and
choice of tokens add in the engine's thread; the simulated one has nothing like them.

  waits, one     the next step is launched when the tokens of the one before are sent; one process
  waits, two     a process for the engine, one for the server, and a pair of Unix sockets between them
  ahead, ...     the next step is launched while the device still computes the one before (as on CUDA)

The modes take turns in each repeat. For every mode a row of medians tells:

  begun      streams that had a token at the end. A server that is behind answers no new request
  tokens/s   tokens per second that clients got, and their share of what the device can compute
  late       milliseconds from the end of a step to the end of the next one, beyond --step-ms: mean
  waited     the part of them in which the engine's thread waited for the Python lock, mean: that is neither
             its own processor time, nor sleep, nor a wait for a processor that other threads had
  engine     processor time of the engine's thread per step
  texts      processor time of the other threads of an engine's process of its own, per step
  http       processor time of the other threads of the server's process, per step whose tokens it sent
  lock       the most processor time per step of one process: if it is above --step-ms, the device waits, or
             clients fall behind, however many processors there are
  token      processor time of server and engine per token, in microseconds
  starved    processors that threads of server and engine were ready to use, but did not get: how much other
             work disturbed the run. Times by the clock are worth little if it is not small

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import copyreg
import json
import os
import pickle
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

MODES = ("waits, one", "waits, two", "waits, one, joined", "waits, two, joined", "ahead, one", "ahead, two", "ahead, one, joined", "ahead, two, joined")
BEGIN_S = 15.0
"""Seconds that streams have to begin. Those that have not begun by then are not waited for."""
PROMPT = "Count from one to a thousand, please."


# The engine, and its simulated device.


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


def make_engine(args: argparse.Namespace) -> Any:
    from fovea.engine.config import EngineConfig
    from fovea.engine.simulate.executor import CostExecutor
    from fovea.engine.simulate.serving import SimulatedEngine
    from fovea.planner.cost import CostModel

    class Measured(SimulatedEngine):
        def _executor(self, embeddings: Any) -> Any:
            executor = CostExecutor(self.cost, embeddings, self.filler.token)
            ahead = args.mode.startswith("ahead")
            self.device = Device(executor, self.filler, args.step_ms / 1e3, args.host_ms / 1e3, ahead)
            return self.device

    if "joined" not in args.mode:
        import fovea.engine.simulate.serving

        fovea.engine.simulate.serving.joined = lambda events: events
        if args.real:
            import fovea.engine.engine

            fovea.engine.engine.joined = lambda events: events
    if args.real:
        return make_real_engine(args)
    config = EngineConfig.of(max_running=args.streams, max_queue=0, pace=0.0, target_itl_ms=0)
    return Measured(config, CostModel(step_s=args.step_ms / 1e3, decode_s=0, context_s=0))


class RealSteps:
    """The steps of a real engine whose decoder is replaced by a device that waits."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int, float, float]] = []
        self.slept = 0.0


def make_real_engine(args: argparse.Namespace) -> Any:
    """Return the bundled model, whose decoder and head wait --step-ms and return prepared words."""
    import re

    import torch

    from fovea import Engine

    settings: Any = {"threads": 1, "decode_graphs": "padded", "kv_cache_mib": 1024, "max_queue": 0}
    engine: Any = Engine.from_pretrained("fovea-tiny", max_running=args.streams, pace=0.0, **settings)
    model, tokenizer = engine.runner.model, engine.tokenizer
    rows, config = args.streams, model.decoder.config
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    words = [token for token, text in texts.items() if re.fullmatch(" [a-z]{3,}", text)]
    states = torch.zeros(8192, config.hidden, dtype=model.dtype)
    scores = torch.rand(max(rows, 512), config.vocab_size, generator=torch.Generator().manual_seed(7))
    scores[:, words] += 1.0
    device = engine.device = RealSteps()

    def embed(ids: Any) -> Any:
        return states[: len(ids)]

    def decode(x: Any, *rest: Any, **named: Any) -> Any:
        return states[: len(x)]

    def logits(hidden: Any) -> Any:
        device.slept += args.step_ms / 1e3
        time.sleep(args.step_ms / 1e3)
        return scores[: len(hidden)]

    model.decoder.embed, model.decoder.forward, model.logits = embed, decode, logits
    execute = engine.runner.execute

    def measured(plan: Any, encode_s: float) -> Any:
        result = execute(plan, encode_s)
        device.steps.append((time.monotonic(), len(plan.work), time.thread_time(), device.slept))
        return result

    engine.runner.execute = measured
    return engine


def report(engine: Any) -> None:
    """Print the steps of an engine that has ended."""
    print(json.dumps({"steps": engine.device.steps}), flush=True)


# The prototype of two processes: messages over a pair of Unix sockets, the deltas of a step in one message.

JOIN = "joined" in str(sys.argv)
LENGTH = struct.Struct("<I")


def proxy(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


copyreg.pickle(MappingProxyType, lambda mapping: (proxy, (dict(mapping),)))  # type: ignore[arg-type]


class Wire(asyncio.Protocol):
    """Pickled messages with their lengths before them."""

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self._data = bytearray()
        self._out: list[Any] = []
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if self._out:
            self._flush()

    def connection_lost(self, error: Any) -> None:
        self._receive(None)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= 4:
            (size,) = LENGTH.unpack_from(self._data)
            if len(self._data) < 4 + size:
                return
            message = pickle.loads(memoryview(self._data)[4 : 4 + size])
            del self._data[: 4 + size]
            self._receive(message)

    def post(self, entry: Any) -> None:
        """Add to the message that is sent when all tasks that are ready now have run."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(entry)

    def _flush(self) -> None:
        if self.transport is None:
            return
        data = pickle.dumps(self._out, 5)
        self._out = []
        self.transport.write(LENGTH.pack(len(data)) + data)


class RemoteEngine:
    """An EngineClient whose engine is in another process."""

    def __init__(self, info: Any, side: socket.socket) -> None:
        self.info = info
        self._side = side
        self._wire: Wire | None = None
        self._queues: dict[int, asyncio.Queue[Any]] = {}
        self._number = 0
        self.status = "ready"

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        from fovea.core.types import Delta

        if self._wire is None:
            self._wire = Wire(self._take)
            await asyncio.get_running_loop().create_connection(lambda: self._wire, sock=self._side)
        self._number += 1
        number, queue = self._number, asyncio.Queue()
        self._queues[number] = queue
        self._wire.post((number, request))
        try:
            while True:
                entry = await queue.get()
                while JOIN and len(entry) > 2 and not queue.empty() and len(queue._queue[0]) > 2:
                    later = queue.get_nowait()
                    entry = (*entry[:2], entry[2] + later[2], entry[3] + later[3], *entry[4:])
                if len(entry) == 2:
                    yield entry[1]
                    if entry[1].usage is not None:
                        return
                else:
                    _, index, text, ids, prompt, cached = entry
                    yield Delta(index, text, ids, prompt_tokens=prompt, cached_tokens=cached)
        finally:
            del self._queues[number]

    def _take(self, message: Any) -> None:
        for entry in message or ():
            if entry[0] in self._queues:
                self._queues[entry[0]].put_nowait(entry)

    def check_room(self, choices: int, reserved: int = 0) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self, drain_s: float = 0.0) -> None:
        if self._wire is not None:
            self._wire.transport.close()


async def serve_engine(engine: Any, side: socket.socket) -> None:
    ended = asyncio.Event()
    tasks = set()

    def receive(message: Any) -> None:
        if message is None:
            ended.set()
            return
        for number, request in message:
            task = asyncio.ensure_future(run(number, request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def run(number: int, request: Any) -> None:
        async for delta in engine.stream(request):
            if delta.finish_reason is None:
                fields = delta.index, delta.text, delta.token_ids, delta.prompt_tokens, delta.cached_tokens
                wire.post((number, *fields))
            else:
                wire.post((number, delta))

    wire = Wire(receive)
    await asyncio.get_running_loop().create_connection(lambda: wire, sock=side)
    await ended.wait()
    await engine.close()


def run_engine(args: argparse.Namespace) -> None:
    import uvloop

    from fovea.server.run import SWITCH_S, keep_for_life

    sys.setswitchinterval(SWITCH_S)
    side = socket.socket(fileno=args.fd)
    engine = make_engine(args)
    keep_for_life()
    info = pickle.dumps((engine.info, engine.loop._thread.native_id))
    side.sendall(LENGTH.pack(len(info)) + info)
    side.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_engine(engine, side))
    report(engine)


def run_server(args: argparse.Namespace) -> None:
    from fovea.http.settings import HttpSettings
    from fovea.server.app import create_app
    from fovea.server.run import serve
    from fovea.server.settings import ServerSettings

    pids = [os.getpid()]
    engine: Any
    if ", one" in args.mode:
        engine = make_engine(args)
        thread = engine.loop._thread.native_id
    else:
        near, far = socket.socketpair()
        command = [sys.executable, *sys.argv, "--role", "engine", "--fd", str(far.fileno())]
        child = subprocess.Popen(command, pass_fds=[far.fileno()])
        far.close()
        (size,) = LENGTH.unpack(near.recv(4, socket.MSG_WAITALL))
        info, thread = pickle.loads(near.recv(size, socket.MSG_WAITALL))
        near.setblocking(False)
        engine = RemoteEngine(info, near)
        pids.append(child.pid)

    def start() -> None:
        print(json.dumps({"pids": pids, "engine_thread": thread}), flush=True)

    http = HttpSettings(max_connections=args.streams + 8, max_connections_per_address=args.streams + 8)
    serve(create_app(engine, ServerSettings(http=http)), "127.0.0.1", args.port, on_start=start)
    if ", one" in args.mode:
        report(engine)
    else:
        child.wait()


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
    steps = json.loads(await process.stdout.readline())["steps"]
    await process.wait()
    steps = [step for step in steps if began <= step[0] <= ended]
    count, seconds, engine = len(steps), ended - began, about["engine_thread"]
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
    parser.add_argument("--real", action="store_true")
    for name in ("--role", "--mode"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    for name in ("--port", "--fd"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "engine":
        run_engine(args)
    elif args.role == "server":
        run_server(args)
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES if not (args.real and mode.startswith('ahead'))}
    for _ in range(args.repeats):
        for mode in rows:
            rows[mode].append(asyncio.run(measure(args, mode)))
            print(mode, {name: round(value, 3) for name, value in rows[mode][-1].items()}, flush=True)
    medians = {
        mode: {name: statistics.median(row[name] for row in found) for name in found[0]}
        for mode, found in rows.items()
    }
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
