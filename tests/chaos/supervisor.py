"""Processes of the stack: each in its own process group, and started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

POLL_S, RESTART_S, STOP_S, START_S = 0.1, 0.5, 15.0, 90.0


class StackError(Exception):
    """The stack cannot be started."""


class Process:
    """A program that is kept running.

    ready: whether it serves. env: variables beside those of this process. group: file of a memory group that
        the program joins; None: none.
    deaths: how often it has died. recoveries: seconds from each death to its next being ready.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        ready: Callable[[], Awaitable[bool]],
        env: Mapping[str, str] | None = None,
        group: Path | None = None,
    ) -> None:
        self.name, self._command, self._log, self._ready = name, command, log, ready
        self._env, self._group = {**os.environ, **(env or {})}, group
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.deaths = 0
        self.recoveries: list[float] = []

    @property
    def pid(self) -> int:
        """Number of the process; 0: it does not run."""
        return 0 if self._process is None or self._process.poll() is not None else self._process.pid

    async def start(self) -> None:
        """Start the program, wait until it is ready, and keep it running. Raises StackError."""
        self._spawn()
        if not await self._becomes_ready():
            raise StackError(f"{self.name} does not start: {self._log.read_text(errors='replace')[-1500:]}")
        self._keeper = asyncio.create_task(self._keep())

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group of processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def stop(self) -> None:
        """End the program: ask, wait, and kill the rest."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._process is None:
            return
        self.send(signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_S)
        self.send(signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)

    def _spawn(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=self._env,
            )  # fmt: skip
        if self._group is not None:
            self._group.write_text(str(self._process.pid))

    async def _keep(self) -> None:
        """Start the program again whenever it has died, or whenever none of its parts runs any more."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._process is None or self._process.poll() is None:
                continue
            died = time.monotonic()
            self.deaths += 1
            self.send(signal.SIGKILL)
            await asyncio.sleep(RESTART_S)
            self._spawn()
            if await self._becomes_ready():
                self.recoveries.append(time.monotonic() - died)

    async def _becomes_ready(self) -> bool:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.pid:
            if await self._ready():
                return True
            await asyncio.sleep(POLL_S)
        return False
