"""Programs that run beside each other on given cores, and end with this process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from load import Order
from processor_time import Usage, usage
from proxies import Proxy, SetupError, Start

FOLDER = Path(__file__).parent
READY_S, STOP_S, POLL_S = 30.0, 10.0, 0.05
QUESTION = json.dumps(
    {"model": "simulated", "max_tokens": 2, "messages": [{"role": "user", "content": "Are you ready?"}]}
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Program:
    """A process group on given cores.

    cores: numbers of the cores; none: it may run on all.
    """

    def __init__(
        self, command: Sequence[str], cores: Sequence[int], log: Path, env: Mapping[str, str] = {},
        stdin: int = subprocess.DEVNULL, stdout: int | None = None,
    ) -> None:  # fmt: skip
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *pinned, *command],
                stdin=stdin, stdout=out if stdout is None else stdout, stderr=out if stdout is None else None,
                start_new_session=True, env={**os.environ, **env},
            )  # fmt: skip

    def usage(self) -> Usage:
        return usage(self.process.pid)

    def stop(self) -> None:
        """End the processes, and wait until they have ended."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def ask(url: str, path: str, body: str = "", seconds: float = 10.0) -> tuple[int, bytes]:
    """Send one request and return status and body. Raises OSError or HTTPException."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=seconds)
    try:
        connection.request(
            "POST" if body else "GET", path, body or None, {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def wait_until_ready(program: Program, url: str, seconds: float = READY_S) -> None:
    """Wait until a chat request is answered. Raises SetupError with the end of the log if it never is."""
    deadline = time.monotonic() + seconds
    last = "no connection"
    while time.monotonic() < deadline and program.process.poll() is None:
        try:
            status, answer = ask(url, "/v1/chat/completions", QUESTION)
        except (OSError, http.client.HTTPException) as error:
            last = repr(error)
        else:
            if status == 200:
                return
            last = f"status {status}: {answer[:200]!r}"
        time.sleep(POLL_S)
    log = " | ".join(program.log.read_text(errors="replace").splitlines()[-6:])
    raise SetupError(f"no answer ({last}); its output ends with: {log[-600:] or 'nothing'}")


@contextlib.contextmanager
def backends(count: int, cores: Sequence[int], folder: Path, *options: str) -> Iterator[list[str]]:
    """Run simulated backends in one process, and yield their URLs."""
    ports = [free_port() for _ in range(count)]
    flags = [part for port in ports for part in ("--port", str(port))]
    command = [sys.executable, str(FOLDER / "backend.py"), *flags, *options]
    with Program(command, cores, folder / "backend.log") as program:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        wait_until_ready(program, urls[-1])
        yield urls


@contextlib.contextmanager
def running(proxy: Proxy, backends: Sequence[str], cores: Sequence[int]) -> Iterator[tuple[Program, str]]:
    """Run a proxy in front of backends, and yield it and its URL. Raises SetupError if it does not start."""
    proxy.version()
    with tempfile.TemporaryDirectory(prefix=f"gateway-{proxy.name}-") as folder:
        Path(folder).chmod(0o755)  # workers of nginx run as another user
        start = Start(free_port(), backends, Path(folder), free_port())
        command = proxy.command(start)
        with Program(command, cores, Path(folder) / "output.log", proxy.env(start)) as program:
            url = f"http://127.0.0.1:{start.port}"
            wait_until_ready(program, url)
            yield program, url


class Generator:
    """A load generator in a process of its own, until the end of the block."""

    def __init__(self, cores: Sequence[int], folder: Path) -> None:
        command = [sys.executable, str(FOLDER / "load.py"), "--orders"]
        self._program = Program(
            command, cores, folder / "load.log", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def carry_out(self, order: Order) -> dict[str, Any]:
        """Send the requests of an order, and return the summary.

        Raises RuntimeError if the process has ended.
        """
        process = self._program.process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the load generator has ended; its last lines are above")
        result: dict[str, Any] = json.loads(line)
        return result

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._program.stop()
