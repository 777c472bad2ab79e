"""Real servers for tests, each on a free port, with a folder of its own, and stopped at the end."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

_LONGEST_START_S = 30.0


def free_port() -> int:
    """Return a port of this machine that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(name: str) -> str:
    """Return the path of a program, or skip the test if it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


class RedisServer:
    """A redis-server that keeps nothing on disk. It does not run before `start`.

    url: the URL of its database 0.
    """

    def __init__(self, folder: Path) -> None:
        self._program, self._folder, self.port = program("redis-server"), folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [self._program, *words, "--dir", str(self._folder), "--logfile", str(self._folder / "redis.log")]
        )
        end = time.monotonic() + _LONGEST_START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((self._folder / "redis.log").read_text())
            time.sleep(0.01)

    def kill(self) -> None:
        """End it at once, as kill -9 does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it from running: it accepts connections, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
