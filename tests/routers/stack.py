"""Two engines, and a router in front of them, as processes on free ports."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOVEA = shlex.split(os.environ.get("FOVEA", str(ROOT / ".venv" / "bin" / "fovea")))
BIN = Path(sys.executable).parent
READY_S, ANSWER_S, POLL_S = 120.0, 60.0, 0.3
BLOCK_TOKENS = 16
MODEL = "fovea-tiny"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine: its address, and those of its announcements of blocks and of encoder outputs."""

    url: str
    events: str
    replay: str
    outputs: str
    outputs_replay: str

    def answers(self) -> int:
        """Number of answers until now."""
        found = re.search(r"^fovea:answers_begun_total(?:{[^}]*})? (\S+)", get(self.url, "/metrics"), re.M)
        return int(float(found[1])) if found else 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def get(url: str, path: str) -> str:
    """Return what a URL says. Raises OSError, also for other statuses than 200."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise OSError(f"{url}{path}: {answer.status}: {text[:300]}")
        return text


def ask(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Send a chat request. Raises OSError for other statuses than 200."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_S)
    with contextlib.closing(connection):
        heads = {"content-type": "application/json", **(headers or {})}
        connection.request("POST", CHAT, json.dumps(body), heads)
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise OSError(f"{url}: {answer.status}: {text[:500]}")
        value: dict[str, Any] = json.loads(text)
        return value


@contextlib.contextmanager
def program(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the end of the block. Raises RuntimeError if it ended before, with its words."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
    try:
        yield process
        if process.poll() is not None:
            raise RuntimeError(f"{command[0]} ended with {process.returncode}: {log.read_text()[-2000:]}")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def engines(folder: Path, count: int = 2) -> Iterator[list[Engine]]:
    """Serve fovea-tiny several times, each with announcements."""
    with contextlib.ExitStack() as stack:
        running = []
        for number in range(count):
            port, *others = (free_port() for _ in range(5))
            flags = ("--kv-events", "--kv-events-replay", "--encoder-events", "--encoder-events-replay")
            command = [
                *FOVEA, "serve", MODEL, "--port", str(port), "--threads", "1", "--log-level", "warning",
                "--lame-duck-s", "0",
                *(word for flag, other in zip(flags, others, strict=True) for word in (flag, f"tcp://*:{other}")),
            ]  # fmt: skip
            stack.enter_context(program(command, folder / f"engine-{number}.log"))
            running.append(
                Engine(f"http://127.0.0.1:{port}", *(f"tcp://127.0.0.1:{other}" for other in others))
            )
        for engine in running:
            _wait_until(lambda url=engine.url: get(url, "/ready"), "an engine")
        yield running


@contextlib.contextmanager
def router(
    commands: Sequence[Sequence[str]],
    url: str,
    folder: Path,
    name: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run the programs of a router until the end of the block. Yields its URL when it forwards requests."""
    hello = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
    with contextlib.ExitStack() as stack:
        for number, command in enumerate(commands):
            stack.enter_context(program(command, folder / f"{name}-{number}.log", environment))
        _wait_until(lambda: ask(url, hello), f"{name} (its logs are in {folder})")
        yield url


def _wait_until(try_it: Any, what: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            try_it()
            return
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} is not ready after {READY_S:.0f} s: {error}") from error
        time.sleep(POLL_S)
