"""Send many mixed requests to one server, leave some of them early, and see what stays behind.

    python benchmarks/soak.py [--requests 20000] [--clients 16] [--seconds 3600] [--json FILE]

`fovea serve` runs with the bundled model and small caches, so that all of them are full soon. The clients use
all APIs: chats with and without images, several choices, forms, tools, log probabilities, stored answers,
uploads, and requests that must be refused or that run out of time. A quarter leaves before the answer has
ended, at a random moment. Equal questions must get equal answers all the time.

The resident memory of the server and its decoders is sampled 40 times. It is flat if a straight line through
the second half of the samples grows by at most 5% or 16 MiB over that half. At the end, nothing may be held
for requests that are gone. The exit status is 1 if something is wrong. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from fovea.bench.session import memory_of

SAMPLES = 40
LEAVES = 0.25
"""Share of the requests whose client leaves early."""
GROWTH_SHARE, GROWTH_MIB = 0.05, 16.0
FLAGS = (
    "--kv-cache-mib", "3", "--embed-cache-mib", "4", "--pixel-cache-mib", "4", "--decoded-cache-mib", "4",
    "--image-store-mib", "4", "--response-store-mib", "2", "--threads", "1",
)  # fmt: skip
HELD = (
    "fovea:requests_running", "fovea:requests_waiting", "fovea:kv_blocks_used", "fovea:window_blocks_used",
    "fovea:state_slots_used", "fovea:embed_cache_held_bytes", "fovea:media_held_bytes", "fovea:pixel_bytes",
)  # fmt: skip
"""Metrics of what requests hold."""
BROKEN = ("fovea:integrity_errors_total", "fovea:decoder_crashes_total")
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TOOL = {"type": "function", "function": {"name": "count", "parameters": {
    "type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}}}  # fmt: skip
FORM = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer"}},
        "required": ["colour", "count"]}  # fmt: skip
Ask = tuple[str, dict[str, Any], int]
"""Path, body and expected status of a request."""


def picture(seed: int, side: int) -> str:
    """The data: URL of a random picture."""
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def request(rng: random.Random) -> Ask:
    """A request of a random kind."""
    question = f"How many red shapes are there in picture {rng.randrange(40)}?"
    text = [{"role": "user", "content": question}]
    # Half of the pictures were sent before, and half are new, so that caches are hit and overflow.
    seed = rng.randrange(20) if rng.random() < 0.5 else rng.randrange(10**9)
    image = {"type": "image_url", "image_url": {"url": picture(seed, 32 * rng.randrange(2, 8))}}
    seen = [{"role": "user", "content": [image, {"type": "text", "text": "How many objects can you see?"}]}]
    limit = rng.randrange(2, 24)
    kinds: tuple[Ask, ...] = (
        (CHAT, {"messages": text, "max_tokens": limit}, 200),
        (CHAT, {"messages": text, "max_tokens": limit, "n": 3, "temperature": 1}, 200),
        (CHAT, {"messages": seen, "max_tokens": limit}, 200),
        (CHAT, {"messages": seen, "max_tokens": limit, "logprobs": True, "top_logprobs": 5}, 200),
        (CHAT, {"messages": text, "max_tokens": 40, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}}, 200),
        (CHAT, {"messages": text, "max_tokens": 40, "tools": [TOOL], "tool_choice": "required"}, 200),
        (TEXT, {"prompt": [question, "red"], "max_tokens": limit, "echo": True, "logprobs": 2}, 200),
        (TEXT, {"prompt": question * 20, "max_tokens": limit}, 200),
        (RESPONSES, {"input": question, "max_output_tokens": limit}, 200),
        (MESSAGES, {"messages": text, "max_tokens": limit}, 200),
        ("/v1/images", {"url": picture(seed, 64)}, 200),
        ("/tokenize", {"messages": seen}, 200),
        (CHAT, {"messages": text, "top_k": -7}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{
            "type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]}, 400),
        (CHAT, {"messages": seen, "max_tokens": 200, "ignore_eos": True, "timeout": 0.05}, 408),
    )  # fmt: skip
    path, body, status = rng.choice(kinds)
    if path not in ("/v1/images", "/tokenize"):
        body = {"temperature": 0, **body}
    return path, body, status


@dataclass
class Soak:
    """The clients of one run, and what they have seen.

    answers: the text of each answer without randomness, by its request.
    tally: ends of requests. wrong: what must not be, with its number.
    """

    url: str
    total: int
    ends: float
    seed: int = 7
    sent: int = 0
    answers: dict[str, str] = field(default_factory=dict)
    tally: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    async def client(self, number: int) -> None:
        rng = random.Random(f"{self.seed}:{number}")
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            while self.sent < self.total and time.monotonic() < self.ends:
                self.sent += 1
                try:
                    await self._ask(http, rng)
                except httpx.HTTPError as error:
                    self.wrong[type(error).__name__] += 1

    async def _ask(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        path, body, status = request(rng)
        streamed = path in (CHAT, RESPONSES, MESSAGES) and status == 200 and rng.random() < 0.5
        if status == 200 and rng.random() < LEAVES:
            await self._leave(http, path, {**body, "stream": streamed}, rng)
            return
        if streamed:
            body = {**body, "stream": True}
        answer = await http.post(path, json=body)
        busy = answer.status_code in (429, 503)
        self.tally["busy" if busy else str(answer.status_code)] += 1
        # Whether a request is in time is not certain.
        if not busy and answer.status_code != status and not (status == 408 and answer.status_code == 200):
            self.wrong[f"{path}: {answer.status_code} instead of {status}: {answer.text[:150]}"] += 1
        elif streamed and ('"error":{' in answer.text or not answer.text):
            self.wrong[f"{path}: the stream has an error: {answer.text[-150:]}"] += 1
        elif answer.status_code == 200 and path == CHAT and not streamed and body["temperature"] == 0:
            self._compare(json.dumps(body), answer.json())

    def _compare(self, key: str, answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]["message"]
        text = choice["content"] or choice["tool_calls"][0]["function"]["arguments"]
        if len(key) < 20_000 and self.answers.setdefault(key, text) != text:
            self.wrong["another answer to an equal question"] += 1

    async def _leave(
        self, http: httpx.AsyncClient, path: str, body: dict[str, Any], rng: random.Random
    ) -> None:
        """Send a request and close the connection after a few events, or after a while."""
        self.tally["left"] += 1
        if path in ("/v1/images", "/tokenize"):
            body.pop("stream")
        try:
            async with asyncio.timeout(rng.random() * 0.3), http.stream("POST", path, json=body) as answer:
                lines, most = 0, rng.randrange(8)
                async for _ in answer.aiter_lines():
                    lines += 1
                    if lines > most:
                        return
        except TimeoutError:
            return


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    lines = (await http.get("/metrics")).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def left_behind(http: httpx.AsyncClient) -> dict[str, float]:
    """Return what is still held after the last request, when nothing changes any more."""
    for _ in range(100):
        values = await metrics(http)
        held = {name: value for name in HELD if (value := values.get(name, 0.0))}
        if not held:
            break
        await asyncio.sleep(0.1)
    return held | {name: value for name in BROKEN if (value := values.get(name, 0.0))}


def growth(steps: list[float], mib: list[float]) -> tuple[float, float]:
    """MiB per step in the second half, by a straight line, and over all of that half."""
    half = len(mib) // 2
    if len(set(steps[half:])) < 2:
        return 0.0, 0.0
    slope = statistics.linear_regression(steps[half:], mib[half:]).slope
    return slope, slope * (steps[-1] - steps[half])


async def soak(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run all clients, and return the report."""
    began = time.monotonic()
    run = Soak(url, args.requests, began + args.seconds)
    steps: list[float] = []
    mib: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as http, asyncio.TaskGroup() as group:
        clients = [group.create_task(run.client(number)) for number in range(args.clients)]
        while not all(client.done() for client in clients):
            if run.sent >= len(steps) * args.requests / SAMPLES:
                steps.append(run.sent / 1000)
                mib.append(round(memory_of(pid).resident_mib, 1))
                print(
                    f"{run.sent:6} requests, {time.monotonic() - began:6.0f} s: {mib[-1]:.1f} MiB", flush=True
                )
            await asyncio.sleep(0.05)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        held = await left_behind(http)
        final = await metrics(http)
    slope, over = growth(steps, mib)
    return {
        "requests": run.sent, "seconds": round(time.monotonic() - began), "ends": dict(run.tally),
        "wrong": dict(run.wrong), "held": held, "mib": mib, "thousands": steps,
        "mib_per_1000": round(slope, 2), "growth_mib": round(over, 1),
        "flat": over <= max(GROWTH_MIB, GROWTH_SHARE * max(mib)),
        "preemptions": final.get("fovea:preemptions_total", 0.0),
        "open_files": final.get("process_open_fds", 0.0),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3600, help="end after this time")
    parser.add_argument("--json", type=Path, help="write the report to this file, too")
    args = parser.parse_args()
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "fovea.cli.main",
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *FLAGS,
    ]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, server)
            report = asyncio.run(soak(url, server.pid, args))
        finally:
            server.terminate()
            server.wait(30)
    text = json.dumps(report)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    return 0 if report["flat"] and not report["wrong"] and not report["held"] else 1


def wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers. Raises RuntimeError if it ends before."""
    while True:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
