"""One engine's server as a process group: started on given cores, frozen while others are measured, stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from servers.base import OFFLINE, SetupError, Start, tail

from fovea.bench.memory import Memory, memory_of

ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""A run that is killed leaves no frozen servers behind."""
POLL_S, ANSWER_S, STOP_S = 0.5, 120.0, 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """log: what it says. cores: on which it may run, as taskset writes them; there is a thread for each."""

    def __init__(self, start: Start, port: int, cores: tuple[int, ...], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.pools_mib = start.pools_mib
        self._log = log
        threads = {name: str(len(cores)) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*ENDS_WITH_US, "taskset", "--cpu-list", ",".join(map(str, cores)), *start.command],
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **OFFLINE, **threads, **start.env},
            )  # fmt: skip

    def wait(self, seconds: float) -> float:
        """Until it answers a first question; how long that took. Raises SetupError with the end of its log."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if self._process.poll() is not None:
                raise SetupError(f"the server ended with {self._process.returncode}: {tail(self._log)}")
            with contextlib.suppress(httpx.TransportError):
                if self._answers():
                    return time.monotonic() - began
            time.sleep(POLL_S)
        raise SetupError(f"the server did not answer within {seconds:.0f} s: {tail(self._log)}")

    def _answers(self) -> bool:
        """Some list their model long before they can use it."""
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
        """Not a thread of it runs until `awake`: engines that poll would otherwise slow down the one that is measured."""
        self._signal(signal.SIGSTOP)

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
