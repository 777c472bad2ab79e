"""Measure roles against one engine that does everything, on two cores: gaps of text beside images.

    make bench-roles     # or:
    python benchmarks/roles.py [--only tiny,small,fault] [--rounds 3] [--out benchmarks/results]

Three setups serve the same load, in turns, for several rounds:

  integrated        one server with two threads, on both cores
  encode apart      a server with the role encode, and one with prefill-decode; one thread and one core each
  prefill apart     a server with the role prefill, and one with decode; one thread and one core each

Two clients read text answers all the time. Requests with a new image arrive at shares of the rate at which
the integrated server alone answers such requests with one token. Gaps are those of the text answers. `tiny`
is fovea-tiny, `small` random weights with 0.5 B parameters. `fault` kills the encode server while it encodes
an image, and compares the longest gap of the text answers with the usual one.

The script writes roles.json and roles.md to --out. Sections that are not measured are taken from the
roles.json that is there. All of it takes about 12 minutes on two idle cores:
loads that would begin after --minutes are left out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).parent))

from checkpoint import write_checkpoint
from fovea.bench import session
from fovea.bench.client import Client
from fovea.bench.measure import BenchRequest, Sample
from fovea.bench.settings import Target
from fovea.core.measure import percentile
from roles_page import CELLS, ENCODE_APART, INTEGRATED, SECTIONS, SETUPS, page
from soak import free_port, wait_ready
from speculation_runs import ROOT, machine

STREAMS = 2
TEXT_TOKENS, IMAGE_TOKENS = 256, 8
COUNTERS = (
    "transfers", "transfer_bytes", "transfer_seconds", "peer_encode_done", "peer_prefill_done",
    "peer_encode_failed", "peer_prefill_failed",
)  # fmt: skip
FAULT_SIDE = 672
KILL_AFTER = 0.3
"""When the encode server is killed, as a share of the time that its image takes otherwise."""


@dataclass
class Setup:
    """A way to serve. servers: its processes, the one that answers clients last."""

    servers: list[subprocess.Popen[bytes]]
    url: str


def start_setups(
    args: argparse.Namespace, model: str, folder: Path, names: Iterable[str]
) -> dict[str, Setup]:
    """Start the servers of setups. Those that have nothing to do wait without taking time."""
    started: list[tuple[subprocess.Popen[bytes], str]] = []
    first, second = args.cores
    key = secrets.token_hex(16)

    def start(cores: Sequence[int], *flags: str) -> tuple[subprocess.Popen[bytes], str]:
        port = free_port()
        command = [
            sys.executable, "-m", "fovea.cli.main", "serve", model, "--port", str(port),
            "--threads", str(len(cores)), "--kv-cache-mib", "256", "--transfer-dir", str(folder), *flags,
        ]  # fmt: skip
        log = (folder / f"{port}.log").open("wb")
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "FOVEA_PEER_KEY": key},
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        return process, f"http://127.0.0.1:{port}"

    setups = {}
    for name in names:
        servers = []
        if name == INTEGRATED:
            servers = [start((first, second))]
        elif name == ENCODE_APART:
            servers = [start((second,), "--role", "encode")]
            servers.append(start((first,), "--role", "prefill-decode", "--encode-peers", servers[0][1]))
        else:
            # Prompts of the text answers are shorter than these tokens, those with images are longer.
            servers = [start((second,), "--role", "prefill")]
            flags = "--role", "decode", "--prefill-peers", servers[0][1], "--remote-prefill-tokens", "64"
            servers.append(start((first,), *flags))
        started += servers
        setups[name] = Setup([process for process, _ in servers], servers[-1][1])
    for process, url in started:
        try:
            wait_ready(url, process)
        except RuntimeError:
            stop(setups)
            print((folder / f"{url.rpartition(':')[2]}.log").read_text(), file=sys.stderr)
            raise
    return setups


def stop(setups: dict[str, Setup]) -> None:
    for setup in setups.values():
        for process in setup.servers:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a server and all its processes at once."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def serving(
    args: argparse.Namespace, model: str, names: Iterable[str] = SETUPS
) -> Iterator[dict[str, Setup]]:
    with tempfile.TemporaryDirectory(prefix="fovea-") as folder:
        setups = start_setups(args, model, Path(folder), names)
        try:
            for setup in setups.values():
                session.run(warm_up(setup.url))
            yield setups
        finally:
            stop(setups)


def picture(side: int) -> BenchRequest:
    """A request with a new picture: a few random colours that run into each other."""
    pixels = np.frombuffer(secrets.token_bytes(3 * 64 * 64), dtype=np.uint8).reshape(64, 64, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR).save(file, "JPEG", quality=90)
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return BenchRequest(({"role": "user", "content": content},), IMAGE_TOKENS, images=1)


def words(tokens: int) -> BenchRequest:
    text = " ".join(secrets.token_hex(2) for _ in range(8))
    return BenchRequest(({"role": "user", "content": f"{text}: go on."},), tokens)


async def warm_up(url: str) -> None:
    async with Client(Target(url)) as client:
        await client.connect()
        for request in (words(16), picture(224), picture(448), words(16)):
            await send(client, request)


async def send(client: Client, request: BenchRequest) -> Sample:
    """Send a request. Raises RuntimeError unless the answer is complete."""
    sample = await client.send(request)
    if sample.failure is not None:
        raise RuntimeError(f"{sample.failure.kind}: {sample.failure.text}")
    return sample


def capacity(url: str, side: int, count: int) -> float:
    """Return how many requests with an image a server answers per second, with one token each."""

    async def run() -> float:
        async with Client(Target(url)) as client:
            await client.connect()
            requests = [BenchRequest(picture(side).messages, 1, images=1) for _ in range(count)]
            started = time.perf_counter()
            await asyncio.gather(*(send(client, request) for request in requests))
            return count / (time.perf_counter() - started)

    return session.run(run())


class Streams:
    """Text answers that are read all the time. gaps: seconds between pieces of one answer."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._over = False
        self.gaps: list[float] = []
        self.tokens = 0
        self._tasks = [asyncio.create_task(self._read()) for _ in range(STREAMS)]

    async def _read(self) -> None:
        while not self._over:
            sample = await self._client.send(words(TEXT_TOKENS), on_progress=lambda _: self._over)
            if sample.failure is not None and not self._over:
                raise RuntimeError(f"{sample.failure.kind}: {sample.failure.text}")
            times = sample.events
            self.gaps += [b - a for a, b in zip(times, times[1:], strict=False)]
            self.tokens += len(times)

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)


def one_run(setup: Setup, requests: Sequence[BenchRequest], arrivals: Sequence[float]) -> dict[str, float]:
    """Serve one load, and return its figures. arrivals: seconds from the start of each image."""

    async def run() -> dict[str, float]:
        async with Client(Target(setup.url)) as client:
            await client.connect()
            before = counters(setup.url)
            streams, started = Streams(client), time.perf_counter()

            async def image(request: BenchRequest, at: float) -> Sample:
                await asyncio.sleep(started + at - time.perf_counter())
                return await send(client, request)

            pairs = zip(requests, arrivals, strict=True)
            samples = await asyncio.gather(*(image(request, at) for request, at in pairs))
            await streams.end()
            spent = time.perf_counter() - started
            after = counters(setup.url)
        change = {name: after[name] - before[name] for name in COUNTERS}
        firsts, gaps = sorted(sample.ttft for sample in samples), sorted(streams.gaps)
        return {
            "gap_p50_ms": 1e3 * percentile(gaps, 50),
            "gap_p99_ms": 1e3 * percentile(gaps, 99),
            "gap_longest_ms": 1e3 * gaps[-1],
            "ttft_p50_ms": 1e3 * percentile(firsts, 50),
            "ttft_p99_ms": 1e3 * percentile(firsts, 99),
            "text_tokens_per_s": streams.tokens / spent,
            "images_per_s": len(samples) / (max(sample.ended_at for sample in samples) - started),
            "images": len(samples),
            "transfer_ms_per_image": 1e3 * change["transfer_seconds"] / len(samples),
            "transfer_kb_per_image": change["transfer_bytes"] / len(samples) / 1e3,
            "by_peers": change["peer_encode_done"] + change["peer_prefill_done"],
            "peer_failures": change["peer_encode_failed"] + change["peer_prefill_failed"],
        }

    return session.run(run())


def counters(url: str) -> dict[str, float]:
    """The counters of an engine about its peers."""
    found = dict.fromkeys(COUNTERS, 0.0)
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        name = line.removeprefix("fovea:").split("{")[0].split(" ")[0].removesuffix("_total")
        if name in found:
            found[name] = float(line.rpartition(" ")[2])
    return found


def cells(args: argparse.Namespace, name: str, model: str) -> dict[str, Any]:
    """Measure all sizes and loads of one model."""
    found = []
    with serving(args, model) as setups:
        for cell in CELLS[name]:
            side = cell.side
            rate = capacity(setups[INTEGRATED].url, side, cell.probes)
            for load in cell.loads[:1] if args.quick else cell.loads:
                if found and time.perf_counter() > args.latest:
                    print(f"{name}, {side}x{side}, load {load}: left out, it is late", file=sys.stderr)
                    continue
                count = max(1, round(load * rate * cell.seconds * args.length))
                rounds = []
                for number in range(args.rounds):
                    rng = Random(f"{side} {load} {number}")
                    arrivals = [(place + rng.random()) / (load * rate) for place in range(count)]
                    if count == 1:
                        arrivals = [1.0]
                    turns = {}
                    for title in cell.setups:
                        turns[title] = one_run(setups[title], [picture(side) for _ in arrivals], arrivals)
                    rounds.append(turns)
                found.append({"side": side, "load": load, "images_per_s": rate, "rounds": rounds})
                print(f"{name}, {side}x{side}, load {load}: {summary(rounds)}", file=sys.stderr, flush=True)
    return {"model": Path(model).name, "cells": found}


def summary(rounds: Sequence[dict[str, Any]]) -> str:
    return ", ".join(
        f"{title}: longest gap {statistics.median(one[title]['gap_longest_ms'] for one in rounds):.0f} ms, "
        f"first token {statistics.median(one[title]['ttft_p50_ms'] for one in rounds):.0f} ms"
        for title in rounds[0]
    )


def fault(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Kill the encode server while it encodes an image, beside text answers."""
    with serving(args, model, (ENCODE_APART,)) as setups:
        setup = setups[ENCODE_APART]

        async def run(kill_after: float | None) -> dict[str, float]:
            async with Client(Target(setup.url)) as client:
                await client.connect()
                streams = Streams(client)
                await asyncio.sleep(1.0)
                task = asyncio.create_task(client.send(picture(args.fault_side)))
                if kill_after is not None:
                    await asyncio.sleep(kill_after)
                    if task.done():
                        raise RuntimeError("the image was answered before its encoder was killed")
                    os.killpg(setup.servers[0].pid, signal.SIGKILL)
                sample = await task
                await streams.end()
            if sample.failure is not None:
                raise RuntimeError(f"the request failed: {sample.failure}")
            return {
                "ttft_ms": 1e3 * sample.ttft,
                "gap_p99_ms": 1e3 * percentile(sorted(streams.gaps), 99),
                "gap_longest_ms": 1e3 * max(streams.gaps),
            }

        usual = session.run(run(None))
        before = counters(setup.url)
        killed = session.run(run(KILL_AFTER * usual["ttft_ms"] / 1e3))
        failed = counters(setup.url)["peer_encode_failed"] - before["peer_encode_failed"]
        if not failed:
            raise RuntimeError("no work of a peer failed: the encoder was not killed while it encoded")
        alone = session.run(run(None))
    return {
        "model": Path(model).name,
        "side": args.fault_side,
        "usual": usual,
        "killed": killed,
        "without": alone,
    }


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    store = args.out / "roles.json"
    body: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    for name in args.only:
        where, started = machine(2), time.perf_counter()
        small = name != "tiny" and not args.quick
        model = str(write_checkpoint(args.folder)) if small else "fovea-tiny"
        result = fault(args, model) if name == "fault" else cells(args, name, model)
        minutes = (time.perf_counter() - started) / 60
        body[name] = {**result, "machine": where, "minutes": minutes}
        print(f"{name}: {minutes:.1f} minutes", file=sys.stderr, flush=True)
        store.write_text(json.dumps(body) + "\n")
        (args.out / "roles.md").write_text(page(body) + "\n")
    print(page(body))
    print(json.dumps(body))
    return 0


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(SECTIONS):
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: some of {','.join(SECTIONS)}")
    return names


def _cores() -> tuple[int, ...]:
    allowed: Iterable[int] = sorted(os.sched_getaffinity(0))
    return tuple(allowed)[:2]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", type=_sections, default=SECTIONS, help="sections to measure")
    add("--rounds", type=int, default=3, help="turns of all setups")
    add("--length", type=float, default=1.0, help="multiple of the time in which images arrive")
    add("--minutes", type=float, default=8.0, help="no further load is begun after this time")
    add("--fault-side", type=int, default=FAULT_SIDE, help="side of the image whose encoder is killed")
    add("--folder", type=Path, default=Path("/tmp/fovea-bench/qwen2.5-vl-0.5b-random"))
    add("--out", type=Path, default=ROOT / "benchmarks/results")
    add("--quick", action="store_true", help="the tiny model alone, to see that it works")
    args = parser.parse_args()
    args.cores = _cores()
    args.latest = time.perf_counter() + 60 * args.minutes
    if len(args.cores) < 2:
        parser.error("roles are compared on two cores, and this process may use one")
    if args.quick:
        args.only, args.rounds, args.length = ("tiny", "fault"), 1, 0.2
    return args


if __name__ == "__main__":
    sys.exit(main())
