"""Servers that doctor starts, loads, kills and starts again: processes of their own on a loopback port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from fovea.core.errors import EngineError
from fovea.doctor.server import NoAnswer, Server, Web

POLL_S = 0.05
STOP_S = 60.0
"""Seconds that a server has to end after SIGTERM, beyond its drain times, before it is killed."""
FAULT_FLAGS = (
    "--allow-private-hosts", "true",
    "--allow-remote", "true",
    "--fetch-timeout-s", "2",
    "--connect-timeout-s", "1",
    "--fetch-cache-mib", "0",
    "--max-pixels", "4000000",
    "--kv-blocks", "512",
    "--max-context", "0",
    "--when-full", "wait",
    "--lame-duck-s", "1",
    "--drain-seconds", "30",
)  # fmt: skip
"""Settings of the disturbed server: it may fetch from this machine, gives up soon, and has little KV."""


class Launcher(Protocol):
    """Starts servers of one checkpoint. At most one runs at a time, so that the model is loaded once."""

    def plain(self) -> Server:
        """Return the running server with the user's settings; it is started if it does not run.

        Raises EngineError if it does not start.
        """
        ...

    def disturbed(self) -> Server:
        """Return the running server with FAULT_FLAGS and a disk cache; it is started if it does not run.

        Raises EngineError if it does not start.
        """
        ...

    def kill(self) -> None:
        """End the running server at once, as SIGKILL does."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM to the running server, and return at once."""
        ...

    def wait(self) -> int | None:
        """Wait until the running server has ended. Return its exit status; None: it had to be killed."""
        ...

    def log(self) -> str:
        """Return what the running server has logged; empty: none runs."""
        ...

    @property
    def cache_folder(self) -> Path:
        """The folder of the disturbed server's disk cache, which outlives its processes."""
        ...

    @property
    def ready_seconds(self) -> float:
        """Seconds that the last start took until the server was ready."""
        ...


class ProcessLauncher:
    """Starts `fovea serve` as a process, as a context manager; at its end no process and no folder is left.

    command: program and arguments of the server, without address and port.
    env: its environment. keys: the keys that it gets, for requests.
    timeout: seconds that it has until it is ready.
    drain_s: seconds that the settings give a server between SIGTERM and its end.
    disk_cache: whether the plain server, too, has a disk cache, in a folder of its own.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        web: Web,
        *,
        keys: Mapping[str, str],
        timeout: float,
        drain_s: float = 0.0,
        disk_cache: bool = False,
    ) -> None:
        self._command, self._env, self._web, self._keys = command, env, web, keys
        self._timeout, self._stop_s, self._disk_cache = timeout, STOP_S + drain_s, disk_cache
        self._home = tempfile.TemporaryDirectory(prefix="fovea-doctor-")
        self._process: subprocess.Popen[bytes] | None = None
        self._server: Server | None = None
        self._kind = ""
        self._failures: dict[str, EngineError] = {}
        self.ready_seconds = 0.0

    def __enter__(self) -> ProcessLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._home.cleanup()

    @property
    def cache_folder(self) -> Path:
        """The folder of the disk cache."""
        return Path(self._home.name) / "cache"

    def plain(self) -> Server:
        """Return the server with the user's settings."""
        cache = ("--embed-disk-dir", str(Path(self._home.name) / "plain")) if self._disk_cache else ()
        return self._running("plain", cache)

    def disturbed(self) -> Server:
        """Return the server with FAULT_FLAGS."""
        return self._running("disturbed", (*FAULT_FLAGS, "--embed-disk-dir", str(self.cache_folder)))

    def kill(self) -> None:
        """End the server at once, with its decoding processes."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int | None:
        """Wait for the end."""
        if self._process is None:
            return None
        try:
            status = self._process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            status = None
        self.kill()
        return status

    def log(self) -> str:
        """Return the log."""
        return self._log().read_text(encoding="utf-8", errors="replace") if self._server is not None else ""

    def _running(self, kind: str, flags: Sequence[str]) -> Server:
        process = self._process
        if self._server is not None and self._kind == kind and process is not None and process.poll() is None:
            return self._server
        if kind in self._failures:
            raise self._failures[kind]
        self._end()
        self._kind = kind
        try:
            self._server = self._start(flags)
        except EngineError as error:
            self._end()
            self._failures[kind] = error
            raise
        return self._server

    def _log(self) -> Path:
        return Path(self._home.name) / f"{self._kind}.log"

    def _start(self, flags: Sequence[str]) -> Server:
        port, log = _free_port(), self._log()
        begun = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*self._command, "--host", "127.0.0.1", "--port", str(port), *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        server = Server(f"http://127.0.0.1:{port}", self._web, **self._keys)
        while time.monotonic() < begun + self._timeout:
            with contextlib.suppress(NoAnswer):
                if server.get("/ready").status == 200:
                    self.ready_seconds = time.monotonic() - begun
                    return server
            if self._process.poll() is not None:
                raise EngineError(f"the server ended with status {self._process.returncode}: {_end_of(log)}")
            time.sleep(POLL_S)
        raise EngineError(f"the server was not ready after {self._timeout:g} s: {_end_of(log)}")

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.terminate()
            self.wait()
        self._forget()

    def _forget(self) -> None:
        """Kill what is left of the server's process group, such as decoding processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process = self._server = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return " | ".join(line.strip() for line in lines[-3:])[:600] or "it wrote no log"
