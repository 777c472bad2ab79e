"""The server under attack: a process group of its own, its memory, and whether it still answers."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from fovea.bench.session import memory_of
from fovea.core.errors import ConfigError

ATTACKER_KEY, *INNOCENT_KEYS = "key-of-the-attacker", "key-of-the-text-client", "key-of-the-image-client"
START_S, POLL_S, STOP_S, SAMPLE_S = 120.0, 0.2, 15.0, 0.1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Setup:
    """Settings of the server that an attack changes. All others have their defaults.

    flags: further flags of `fovea serve`.
    files: RLIMIT_NOFILE of the server; 0: the limit of this process.
    nameserver: address of the only DNS server that it asks; empty: those of the machine. Needs root.
    gateway: whether a `fovea gateway`, which has the keys, is in front of the server.
    keys: whether it has API keys.
    """

    flags: tuple[str, ...] = ()
    files: int = 0
    nameserver: str = ""
    gateway: bool = False
    keys: bool = True


class Server:
    """A running `fovea serve` with the bundled model and three API keys."""

    def __init__(self, setup: Setup = Setup(), folder: Path | None = None) -> None:
        self.port = free_port()
        self._folder = folder or Path(tempfile.mkdtemp(prefix="fovea-attack-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        self.log = self._folder / f"serve-{self.port}.log"
        names = (ATTACKER_KEY, *INNOCENT_KEYS) if setup.keys else ()
        keys = [part for key in names for part in ("--api-key", key)]
        program = [sys.executable, "-m", "fovea.cli.main"]
        here = ["--host", "127.0.0.1", "--port", str(self.port)]
        command, before = [*program, "serve", *here, *keys, *setup.flags], ""
        if setup.gateway:
            port = str(free_port())
            before = shlex.join([*program, "serve", "--host", "127.0.0.1", "--port", port]) + " &\n"
            command = [
                *program,
                "gateway",
                *here,
                *keys,
                "--backend",
                f"http://127.0.0.1:{port}",
                *setup.flags,
            ]
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self._wrapped(command, setup, before),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wrapped(self, command: list[str], setup: Setup, before: str) -> list[str]:
        """The command after the shell lines that lower its limits. It dies with this process.

        before: shell lines that start other programs.
        """
        lines = before + (f"ulimit -n {setup.files}\n" if setup.files else "")
        shell = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", f'{lines}exec "$@"', "sh"]
        if setup.nameserver:
            file = self._folder / "resolv.conf"
            file.write_text(f"nameserver {setup.nameserver}\noptions timeout:30 attempts:5\n")
            mount = f"mount --bind {file} /etc/resolv.conf\n"
            shell = [
                "setpriv",
                "--pdeathsig",
                "KILL",
                "unshare",
                "--mount",
                "sh",
                "-ec",
                mount + 'exec "$@"',
                "sh",
            ]
        return [*shell, *command]

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until /ready answers 200. Raises RuntimeError with the end of the log."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.alive():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 2) as line:
                line.settimeout(2)
                line.sendall(b"GET /ready HTTP/1.1\r\nHost: server\r\nConnection: close\r\n\r\n")
                if b" 200 " in line.recv(64):
                    return
            time.sleep(POLL_S)
        raise RuntimeError(f"the server did not start: {self.last_words()}")

    def alive(self) -> bool:
        return self._process.poll() is None

    def exit_code(self, patience: float) -> int | None:
        """The exit code of the process; None if it still runs after so many seconds."""
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-400:].replace("\n", " | ")

    def terminate(self) -> None:
        """Send SIGTERM to the server alone, as a supervisor does."""
        os.kill(self.pid, signal.SIGTERM)

    def stop(self) -> None:
        """Kill the whole process group, also a server that hangs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(STOP_S)


@dataclass
class MemoryWatch:
    """Samples the resident memory of a process and its descendants in a thread.

    limit_mib: at this size the process group is killed, to protect the machine.
    peak_mib: the largest sum so far; `baseline_mib` is the first.
    """

    pid: int
    limit_mib: float
    baseline_mib: float = 0.0
    peak_mib: float = 0.0
    killed: bool = False
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> MemoryWatch:
        with contextlib.suppress(OSError):
            # Lets the kernel start a new peak of the server's own process, which sees what sampling misses.
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        self.baseline_mib = self._resident()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self.peak_mib = max(self.peak_mib, self._own_peak())

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self.peak_mib = max(self.peak_mib, self._resident())
            if self.peak_mib > self.limit_mib and not self.killed:
                self.killed = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)

    def _resident(self) -> float:
        try:
            return memory_of(self.pid).resident_mib
        except ConfigError:
            return 0.0

    def _own_peak(self) -> float:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
        return 0.0
