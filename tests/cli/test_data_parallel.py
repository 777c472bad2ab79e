"""fovea serve --data-parallel: answers are those of one engine, and an engine that is killed comes back."""

from __future__ import annotations

import base64
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image as Pillow

from fovea.cli.main import main
from fovea.core.hardware import usable_cores
from fovea.engine.engine import Engine
from tests.cli.test_engine_process import CHAT, WAIT_S, Server, question, serving, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pool is a memfd")
TWO_CORES = pytest.mark.skipif(len(usable_cores()) < 2, reason="every engine needs a core")
TOKENS = "fovea:generation_tokens_total"
DIED = "the engine stopped unexpectedly"


def engine_pids(server: Server) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    return sorted(pid for pid in pids if b"fovea.engine.process.host" in _command(pid))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def check_a_death(server: Server, questions: list[Any]) -> None:
    """Kill the second engine while it and the other one answer questions, and check what clients see."""
    before = engine_pids(server)
    begun = threading.Barrier(len(questions) + 1, timeout=WAIT_S)
    seen = threading.Event()

    def ask(text: Any) -> str:
        body = question(text, stream=True, max_tokens=4000, ignore_eos=True)
        with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=WAIT_S) as answer:
            pieces = answer.iter_text()
            text = next(pieces)
            begun.wait()
            for piece in pieces:
                text += piece
                if seen.is_set():  # it has outlived the others
                    break
            return text

    with ThreadPoolExecutor(len(questions)) as executor:
        answers = [executor.submit(ask, text) for text in questions]
        begun.wait()
        until(lambda: server.metric(TOKENS) > 0)  # figures of engine processes are up to 0.2 s old
        tokens = server.metric(TOKENS)
        os.kill(before[1], signal.SIGKILL)
        until(lambda: any(answer.done() for answer in answers))
        for _ in range(10):
            assert server.ready()
            time.sleep(0.05)
        seen.set()
    lost = [DIED in answer.result() for answer in answers]
    assert any(lost)
    assert not all(lost)
    assert all("error" not in answer.result() for answer in answers if DIED not in answer.result())
    assert server.post().status_code == 200
    until(lambda: "is ready again" in server.log.read_text())
    assert len(set(engine_pids(server)) - set(before)) == 1
    assert before[0] in engine_pids(server)
    assert server.metric(TOKENS) >= tokens > 0
    assert f"the engine's process {before[1]} has ended: SIGKILL" in server.log.read_text()


def test_a_killed_engine_takes_its_requests_alone_with_it(tmp_path: Path) -> None:
    with serving(tmp_path, "--simulate", "--data-parallel", "2") as server:
        check_a_death(server, [f"{number}?" for number in range(10)])


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = ("fovea-tiny", "--data-parallel", "2", "--kv-cache-mib", "64", "--speculate", "off")
    with serving(tmp_path_factory.mktemp("replicas"), *words) as server:
        yield server


def picture(number: int) -> str:
    out = io.BytesIO()
    Pillow.new("RGB", (64, 64), (20 * number, 90, 255 - 20 * number)).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def about(number: int, text: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": picture(number)}}, {"type": "text", "text": text}]


@TWO_CORES
def test_answers_are_those_of_one_engine_and_images_stay(replicas: Server) -> None:
    with Engine.from_pretrained("fovea-tiny", threads=1, kv_cache_mib=64, speculate="off") as engine:
        for number in range(8):
            text = f"Tell me about {number}."
            expected = engine.generate(text, max_tokens=16, temperature=0).text
            answer = replicas.post(text=text).json()
            assert answer["choices"][0]["message"]["content"] == expected
    for turn in range(3):
        for number in range(8):
            usage = replicas.post(text=about(number, f"turn {turn}")).json()["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == (turn > 0)
    assert replicas.metric("fovea:images_encoded_total") == 8


@TWO_CORES
def test_the_processes_have_cores_of_their_own_and_one_pool(replicas: Server) -> None:
    first, second = engine_pids(replicas)
    cores = os.sched_getaffinity(first), os.sched_getaffinity(second)
    assert not cores[0] & cores[1]
    assert cores[0] | cores[1] == os.sched_getaffinity(replicas.process.pid)
    pools = {_pool(pid) for pid in (first, second)}
    assert len(pools) == 1
    assert "libtorch" not in Path(f"/proc/{replicas.process.pid}/maps").read_text()


def _pool(pid: int) -> str:
    """The number of the file that a process maps as its pool."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(line.split()[4] for line in lines if "memfd:fovea-weights" in line)


@TWO_CORES
@pytest.mark.slow
def test_a_killed_engine_of_a_model_comes_back(replicas: Server) -> None:
    check_a_death(replicas, [about(number, "what?") for number in range(8)])
    assert len({_pool(pid) for pid in engine_pids(replicas)}) == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--data-parallel", "64"], "data_parallel is 64, but the server may use"),
        (["--data-parallel", "2", "--device", "cuda"], "several servers behind the gateway"),
        (["--data-parallel", "2", "--role", "encode", "--peer-key", "k"], "servers without peers"),
        (["--data-parallel", "0"], "data_parallel"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "fovea-tiny", "--port", "0", *words]) == 2
    assert error in capsys.readouterr().err
