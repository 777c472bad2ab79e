"""A server as a process group: started on given cores, frozen while others are measured, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
from sampling import Samples, next_instructions
from servers.base import OFFLINE, SetupError, Start, tail

from fovea.bench.session import Memory, memory_of

DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""The servers are killed when this process ends, so that a killed run leaves no frozen servers behind."""
POLL_S, ANSWER_S, STOP_S = 0.5, 120.0, 20.0
SAMPLE_S, HALT_S = 0.05, 0.005
"""Time between two samples of instructions, and time after which all threads have stopped for a sample."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running server of one engine.

    url: base URL of the server.
    pools_mib: MiB of caches that it was configured with.
    """

    def __init__(self, start: Start, port: int, cores: tuple[int, ...], log: Path) -> None:
        """Start the server on the given cores, with one thread per core. log: file for its output."""
        self.url = f"http://127.0.0.1:{port}"
        self.pools_mib = start.pools_mib
        self._log = log
        threads = {name: str(len(cores)) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*DIE_WITH_PARENT, "taskset", "--cpu-list", ",".join(map(str, cores)), *start.command],
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **OFFLINE, **threads, **start.env},
            )  # fmt: skip

    def wait(self, seconds: float) -> float:
        """Wait until the server answers a first question. Returns the seconds that it took.

        Raises SetupError with the end of its log if it ends or does not answer in time.
        """
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            if self._process.poll() is not None:
                raise SetupError(f"the server ended with {self._process.returncode}: {tail(self._log)}")
            with contextlib.suppress(httpx.TransportError):
                if self._answers():
                    return time.monotonic() - started
            time.sleep(POLL_S)
        raise SetupError(f"the server did not answer within {seconds:.0f} s: {tail(self._log)}")

    def _answers(self) -> bool:
        """Whether it answers a chat request; some servers list their model long before they can use it."""
        with httpx.Client(base_url=self.url, timeout=ANSWER_S, trust_env=False) as http:
            listed = http.get("/v1/models")
            if listed.status_code != 200:
                return False
            question = {
                "model": listed.json()["data"][0]["id"], "max_tokens": 2, "stream": True,
                "messages": [{"role": "user", "content": "Say something."}],
            }  # fmt: skip
            return http.post("/v1/chat/completions", json=question).status_code == 200

    def memory(self) -> Memory:
        return memory_of(self._process.pid)

    def freeze(self) -> None:
        """Stop all threads until `awake`; an idle engine that polls would slow down the measured one."""
        self._signal(signal.SIGSTOP)

    @contextlib.asynccontextmanager
    async def sampled(self, samples: Samples) -> AsyncIterator[None]:
        """Add the instructions of its threads to the samples, 18 times a second; it must be awake."""
        sampling = asyncio.create_task(self._sample(samples))
        try:
            yield
        finally:
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampling

    async def _sample(self, samples: Samples) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.freeze()
            try:
                await asyncio.sleep(HALT_S)
                samples.add(next_instructions(self._process.pid))
            finally:
                self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.freeze()

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
