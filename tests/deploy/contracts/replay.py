"""Starts a rendered entry point as its cloud does, replays the cloud's calls, and records what came back."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import fovea
from fovea.deploy.spec import DeploySpec, Pool, Stop
from tests.support import servers
from tests.support.forks import Fork

EXAMPLES = Path(__file__).parents[3] / "examples"
READY_S = 120.0
KEPT = ("HOME", "FOVEA_NATIVE_KERNELS")
"""Variables of the tests that the command needs, too."""
SPEC = DeploySpec(
    pools=(Pool(name="tiny", settings={"threads": 1, "kv_cache_mib": 64}),),
    max_body_mib=1,
    stop=Stop(pre_stop_s=0, lame_duck_s=0, drain_s=20, margin_s=1),
)
Json = dict[str, Any]


def picture(name: str) -> Json:
    """A part of a message with one of the example images."""
    data = base64.b64encode((EXAMPLES / f"{name}.png").read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def question(text: str, *images: str, **fields: Any) -> Json:
    """The body of a chat completion about example images."""
    parts = [*map(picture, images), {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}], "temperature": 0, **fields}


CIRCLES = question("How many circles are there?", "shapes")
PAIR = question("Which colour is in both pictures?", "pair-1", "pair-2", max_tokens=8)
LONG = question("Describe the image.", "shapes", stream=True, max_tokens=120, ignore_eos=True)
ANSWER = "There is 1 circle."


@dataclass
class Record:
    """The answers of a container to a replay.

    health: statuses of the health route from the start to the first 200.
    replies: to the calls of the test, by their names.
    drained: the events of a stream during which SIGTERM arrived; refused: the status of a request after it;
        exit_status: of the process.
    """

    health: list[int] = field(default_factory=list)
    replies: dict[str, httpx.Response] = field(default_factory=dict)
    drained: list[str] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    exit_status: int | None = None


@contextlib.contextmanager
def forked(command: Sequence[str], variables: Mapping[str, str], log: Path) -> Iterator[Fork]:
    """Run an entry point with the variables of its cloud up to the command that it becomes. A fork runs that.

    The command is noted by a `fovea` that stands before the real one, and must not be a child of the shell.
    """
    noted = log.with_name("noted")
    (log.parent / "bin").mkdir()
    fake = log.parent / "bin" / "fovea"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" $$ "$@" > {noted}\nenv -0 > {noted}.env\n')
    fake.chmod(0o755)
    paths = os.pathsep.join((str(fake.parent), str(Path(sys.executable).parent), "/usr/bin", "/bin"))
    with log.open("wb") as output:
        shell = subprocess.Popen(command, env={"PATH": paths, **variables}, stdout=output, stderr=output)
        assert shell.wait(READY_S) == 0, log.read_text()
    number, *words = noted.read_text().splitlines()
    assert int(number) == shell.pid
    told = dict(pair.split("=", 1) for pair in Path(f"{noted}.env").read_text().split("\0") if pair)
    shared = {name: os.environ[name] for name in KEPT if name in os.environ}
    process = Fork(servers.INTO_A_FILE, [str(log), *words], {**told, **shared})
    try:
        yield process
    finally:
        servers.stop(process)
        process.communicate()


@contextlib.contextmanager
def started(
    command: Sequence[str], variables: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run an entry point with the variables of its cloud. Its `fovea` is the one under test."""
    paths = os.pathsep.join((str(Path(sys.executable).parent), "/usr/bin", "/bin"))
    shared = {name: os.environ[name] for name in KEPT if name in os.environ}
    variables = {"PATH": paths, "PYTHONPATH": str(Path(fovea.__file__).parents[1]), **shared, **variables}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        servers.stop(process)


def replay(
    process: subprocess.Popen[bytes] | Fork,
    port: int,
    health: str,
    path: str,
    calls: Mapping[str, Json | bytes],
) -> Record:
    """Wait for health, send the calls, and end the process during a stream."""
    record = Record()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        _wait(process, client, health, record)
        for name, body in calls.items():
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            headers = {"content-type": "application/json"}
            record.replies[name] = client.post(path, headers=headers, **content)  # type: ignore[arg-type]
        with client.stream("POST", path, json=LONG) as stream:
            lines = stream.iter_lines()
            record.drained.append(next(line for line in lines if line))
            process.send_signal(signal.SIGTERM)
            record.refused = _until_refused(client, health)
            record.drained += [line for line in lines if line]
    record.exit_status = process.wait(30)
    return record


def _wait(process: subprocess.Popen[bytes] | Fork, client: httpx.Client, health: str, record: Record) -> None:
    deadline = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            record.health.append(client.get(health).status_code)
            if record.health[-1] == 200:
                return
        time.sleep(servers.POLL_S)
    raise RuntimeError(f"{process.args!r} was never healthy; statuses: {set(record.health)}")


def _until_refused(client: httpx.Client, health: str) -> list[int]:
    """Return the statuses of the health route up to the first that is not 200."""
    statuses = []
    while not statuses or statuses[-1] == 200:
        statuses.append(client.get(health).status_code)
    return statuses
