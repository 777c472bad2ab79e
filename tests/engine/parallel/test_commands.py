"""`fovea serve` with several processes, started by itself and by torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from fovea.core.types import TextPrompt
from tests.support.engines import engine
from tests.support.servers import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
WAIT_S = 90.0
SERVE = ("-m", "fovea.cli.main", "serve")
PROMPT = "the red circle"


@contextlib.contextmanager
def serving(folder: Path, log: Path, *launcher: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server of two processes. Yields its process and its URL when it is ready."""
    port = free_port()
    words = [
        sys.executable, *launcher, *SERVE, str(folder), "--tensor-parallel", "2", "--port", str(port),
        "--dtype", "float32", "--kv-blocks", "64", "--threads", "1", "--device", "cpu",
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, sys.path))
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            env={**os.environ, "PYTHONPATH": path},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or ready(url), log)
        assert process.poll() is None, log.read_text()
        yield process, url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/ready").status_code == 200
    return False


def until(condition: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def complete(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    text: str = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).json()["choices"][0]["text"]
    return text


def workers_of(process: subprocess.Popen[bytes], words: Sequence[str]) -> list[int]:
    """The processes among the children of a process whose command has one of these words."""
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    pids = " ".join(path.read_text() for path in children).split()
    commands = {int(pid): command_of(pid) for pid in pids}
    return [pid for pid, command in commands.items() if any(word in command for word in words)]


def command_of(pid: str) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def ended(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def expected(folder: Path) -> str:
    with engine(folder, kv_blocks=64) as machine:
        return machine.generate(TextPrompt(PROMPT), temperature=0, max_tokens=8, ignore_eos=True).text


def test_a_server_starts_its_workers_and_takes_them_along(qwen: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(qwen, log) as (process, url):
        assert complete(url) == expected(qwen)
        [worker] = workers_of(process, ["fovea.engine.parallel.worker"])
        os.kill(process.pid, signal.SIGKILL)  # its workers hear of it all the same
        until(lambda: ended(worker), log)


@pytest.mark.slow
def test_a_server_that_is_asked_to_end_ends_its_workers(qwen: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(qwen, log) as (process, url):
        [worker] = workers_of(process, ["fovea.engine.parallel.worker"])
        assert complete(url)
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
        until(lambda: ended(worker), log)


@pytest.mark.slow
def test_a_server_whose_worker_dies_is_not_ready(qwen: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(qwen, log) as (process, url):
        [worker] = workers_of(process, ["fovea.engine.parallel.worker"])
        os.kill(worker, signal.SIGKILL)
        until(lambda: not ready(url), log)
        assert "rank 1 has ended (SIGKILL)" in log.read_text()


@pytest.mark.slow
def test_torchrun_runs_the_same_command_on_every_device(qwen: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with serving(qwen, log, *torchrun) as (process, url):
        assert complete(url) == expected(qwen)
        ranks = workers_of(process, ["fovea.cli.main"])
        assert len(ranks) == 2
        process.terminate()
        process.wait(60)
        until(lambda: all(map(ended, ranks)), log)
