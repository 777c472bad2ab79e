"""A program of the stack in a process group of its own, which ends with this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

POLL_S, STOP_S, START_S = 0.1, 30.0, 90.0


class StackError(Exception):
    """The stack cannot be started, or a part of it does not come back."""


class Process:
    """A program. env: variables beside those of this process."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.name, self._command, self._log = name, command, log
        self._env = {**os.environ, **env}
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, ready: Callable[[], Awaitable[bool]]) -> None:
        """Start the program and wait until it is ready. Raises StackError."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=self._env,
            )  # fmt: skip
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            if await ready():
                return
            await asyncio.sleep(POLL_S)
        raise StackError(f"{self.name} does not start: {self._log.read_text(errors='replace')[-1500:]}")

    async def stop(self) -> None:
        """End the program: ask, wait, and kill the rest of its group."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
