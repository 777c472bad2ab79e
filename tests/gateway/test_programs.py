"""Programs that tests start are ready when their block begins, and gone when it ends."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.programs import program
from tests.support.servers import (
    envoy_proxy,
    free_port,
    nginx_proxy,
    redis_server,
    simulated_backends,
    started,
)

LISTEN = """
import os, signal, socket, sys, time
from pathlib import Path
port, file = int(sys.argv[1]), Path(sys.argv[2])
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    file.write_text(str(os.getpid()))
    time.sleep(600)
while not (file.exists() and file.read_text()):
    time.sleep(0.01)
server = socket.create_server(("127.0.0.1", port))
time.sleep(600)
"""
"""Has a child that ignores SIGTERM; writes its number to a file, then listens on a port."""


def is_listening(url: str) -> bool:
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "", address.port or 0), timeout=5.0).close()
    except ConnectionRefusedError:
        return False
    return True


def is_running(pid: int) -> bool:
    """Whether a process exists that has not ended; one that has may wait for its parent."""
    try:
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "start",
    [redis_server, lambda: nginx_proxy(["http://127.0.0.1:1"]), lambda: envoy_proxy(["http://127.0.0.1:1"])],
    ids=["redis", "nginx", "envoy"],
)
def test_a_program_listens_within_its_block_only(start: Callable[[], AbstractContextManager[str]]) -> None:
    with start() as url:
        assert is_listening(url)
    assert not is_listening(url)


def test_simulated_backends_listen_within_their_block_only() -> None:
    with simulated_backends(3) as urls:
        assert [is_listening(url) for url in urls] == [True] * 3
    assert [is_listening(url) for url in urls] == [False] * 3


def test_redis_is_empty_and_answers() -> None:
    with redis_server("--maxmemory", "8mb") as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=5.0) as client:
            client.sendall(b"DBSIZE\r\n")
            assert client.recv(100) == b":0\r\n"


def test_children_end_too(tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "child"
    command = [sys.executable, "-c", LISTEN, str(port), str(file)]
    with started(command, [port], tmp_path / "log") as process:
        pass
    assert process.returncode is not None
    deadline = time.monotonic() + 10.0
    while is_running(int(file.read_text())):
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.01)


def test_a_program_that_ends_at_once_is_an_error_with_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such setting')"]
    with (
        pytest.raises(RuntimeError, match="no such setting"),
        started(command, [free_port()], tmp_path / "log"),
    ):
        pass


def test_a_missing_program_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not installed: fovea-has-no-such-program"):
        program("fovea-has-no-such-program")


def test_a_program_of_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fovea-test-program"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert program(file.name) == str(file)
