"""A real Redis that tests kill, stop and start again on the same port."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import program
from tests.support.servers import free_port

START_S = 10.0
"""Longest time of a start in seconds."""


class RedisProcess:
    """A redis-server without a disk, which can be killed, stopped and started again on the same port."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it accepts connections."""
        line = [
            program("redis-server"),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self._process = subprocess.Popen(
            [*line, "--dir", str(self._folder), *self._options], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise RuntimeError(f"redis-server did not start within {START_S:.0f} s")

    def send(self, number: signal.Signals) -> None:
        """Send a signal, for example SIGSTOP or SIGCONT, unless it was killed."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, as kill -9 does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    """A running redis-server of the test's own."""
    server = RedisProcess(tmp_path)
    server.start()
    try:
        yield server
    finally:
        server.kill()
