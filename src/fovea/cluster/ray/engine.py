"""`fovea serve` as a child process of a replica. It never outlives the replica.

The child asks the kernel for SIGKILL at the death of the thread that started it (prctl's PR_SET_PDEATHSIG),
so a killed replica, raylet or driver leaves no engine behind. It does so itself, after its start, because
code between fork and exec in a process with threads is not safe. Settings go into a file of its own, and
secrets into its environment, so neither is in the list of processes.

This module does not import ray.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fovea.core.errors import EngineError

MAIN = "fovea.cli.main"
PR_SET_PDEATHSIG = 1
POLL_S = 0.1
STOP_MARGIN_S = 15.0
"""Seconds that an engine has to end, beyond its own time for running answers."""
LAST_LINES = 40
SHOWN_LINES = 6


def toml_line(name: str, value: Any) -> str:
    """Return one setting as a line of TOML. Texts, numbers, booleans and lists are as in JSON."""
    return f"{name} = {json.dumps(value)}\n"


def free_port(host: str) -> int:
    """Return a port that nobody listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class EngineProcess:
    """One `fovea serve`, started and ended from a running event loop.

    address: its URL, without a path.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        host: str = "127.0.0.1",
        secrets: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """settings: of `fovea serve`, without host and port. host: where it listens.

        secrets: keys by the names of their variables. environment: further variables.
        """
        self._settings = dict(settings)
        self._host = host
        self._variables = {**(environment or {}), **(secrets or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        """Its process id; 0: it was not started."""
        return self._process.pid if self._process is not None else 0

    @property
    def ended(self) -> str:
        """Why it has ended, in words; "": it runs."""
        if self._process is None:
            return "it was not started"
        if self._process.returncode is None:
            return ""
        said = " | ".join(list(self._lines)[-SHOWN_LINES:]) or "it said nothing"
        return f"it ended with status {self._process.returncode}: {said}"

    async def start(self, *arguments: str) -> None:
        """Start it. arguments: further ones of the command line. It is not ready then."""
        port = free_port(self._host)
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self.address = f"http://{shown}:{port}"
        self._folder = tempfile.TemporaryDirectory(prefix="fovea-engine-")
        file = Path(self._folder.name) / "fovea.toml"
        settings = {**self._settings, "host": self._host, "port": port}
        file.write_text("".join(toml_line(name, value) for name, value in settings.items()), "utf-8")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FOVEA_")}
        self._process = await asyncio.create_subprocess_exec(
            *_command("serve", "--config", str(file), *arguments),
            env={**inherited, **self._variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Copy what it says to this process's stderr, which Ray keeps, and remember the last lines."""
        assert self._process is not None
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # a line without an end
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self._lines.append(text)
            print(text, file=sys.stderr)

    async def wait_until(self, ready: Any) -> None:
        """Wait until `ready`, an asynchronous function of its address, returns true. Raises EngineError."""
        while not await ready(self.address):
            if self.ended:
                await self._drop()
                raise EngineError(f"the engine did not start: {self.ended}")
            await asyncio.sleep(POLL_S)

    async def wait(self) -> None:
        """Wait until it has ended."""
        assert self._process is not None
        await self._process.wait()

    async def stop(self, drain_s: float) -> None:
        """End it: SIGTERM, and after its time for running answers SIGKILL."""
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), drain_s + STOP_MARGIN_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        await self._drop()

    async def _drop(self) -> None:
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1.0)
            self._reader.cancel()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _command(*arguments: str) -> Sequence[str]:
    """Return the command line of a child that ends with this process."""
    return [sys.executable, "-m", __name__, str(os.getpid()), *arguments]


def main(argv: Sequence[str]) -> None:
    """Become `fovea` with the given arguments, and end with the process whose id comes first."""
    parent, arguments = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", MAIN, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
