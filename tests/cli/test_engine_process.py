"""fovea serve --engine-process on: answers equal those of one process, and either side may die."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clips import clip
from tests.support.servers import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
WAIT_S = 90.0
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{CHAT}", json=question(**body), timeout=WAIT_S)

    def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready").status_code == 200
        return False

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        for pid in " ".join(path.read_text() for path in children).split():
            if "fovea.engine.process.host" in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
        raise AssertionError("there is no process of an engine")


def question(text: str = "What is in it?", **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0, **options}


def until(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def ended(pid: int) -> bool:
    """Whether a process has gone, or waits only for its parent to read its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@contextlib.contextmanager
def serving(folder: Path, *words: str, ready: bool = True) -> Iterator[Server]:
    port, log = free_port(), folder / f"{'-'.join(words).replace('/', '_')[-60:]}.log"
    command = [sys.executable, "-m", "fovea.cli.main", "serve", *words, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        if ready:
            until(lambda: server.ready() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A server whose engine has a process of its own, and one whose engine has not."""
    folder = tmp_path_factory.mktemp("servers")
    words = ("fovea-tiny", "--threads", "1", "--kv-cache-mib", "64", "--speculate", "off")
    with (
        serving(folder, *words, "--engine-process", "on") as own,
        serving(folder, *words, "--engine-process", "off") as shared,
    ):
        yield own, shared


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, "--simulate", "--engine-process", "on") as server:
        yield server


def content(answer: httpx.Response) -> Any:
    """An answer without what differs between two equal requests."""
    body = answer.json()
    for name in ("id", "created", "fovea", "system_fingerprint"):
        body.pop(name, None)
    return answer.status_code, body


def pieces(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def data_url(folder: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode((folder / 'a.png').read_bytes()).decode()}"


def streamed(text: str) -> str:
    choices = (choice for piece in pieces(text) for choice in piece.get("choices", ()))
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 2, "temperature": 1.0, "seed": 5},
        {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 1},
        {"stop": ["e"]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"logit_bias": {"300": 50.0}},
        {"timeout": 1e-6},
        {"max_tokens": 10**6},
        {"text": "word " * 20_000},
        {"stop": 3},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_answers_and_errors_are_those_of_one_process(
    both: tuple[Server, Server], options: dict[str, Any]
) -> None:
    own, shared = (content(server.post(**options)) for server in both)
    assert own == shared


@pytest.mark.parametrize("options", [{}, {"video_pruning_rate": 0.5}], ids=["prompt", "error"])
def test_renders_are_those_of_one_process(both: tuple[Server, Server], options: dict[str, Any]) -> None:
    """The engine's process gets neither the pixels nor the files of images."""
    folder = Path(__file__).parents[2] / "examples"
    picture = base64.b64encode((folder / "shapes.png").read_bytes()).decode()
    film = base64.b64encode(clip()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{film}"}},
        {"type": "text", "text": "what is in them?"},
    ]
    body = {"messages": [{"role": "user", "content": parts}], **options}
    own, shared = (
        httpx.post(f"{server.url}{CHAT}/render", json=body, timeout=WAIT_S).json() for server in both
    )
    for answer in (own, shared):
        answer.pop("request_id", None)
    assert own == shared
    if options:
        assert own["error"]["code"] == "needs_pixels"
    else:
        assert {kind: len(names) > 0 for kind, names in own["features"]["mm_hashes"].items()} == {
            "image": True, "video": True,
        }  # fmt: skip


def test_an_image_that_the_server_holds_is_decoded_for_the_engine(
    both: tuple[Server, Server], folder: Path
) -> None:
    url = data_url(folder)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    for _ in range(2):  # the second time from the cache
        own, shared = (content(server.post(text=parts)) for server in both)
        assert own == shared
        assert own[0] == 200


def test_a_video_is_decoded_for_the_engine(both: tuple[Server, Server]) -> None:
    url = f"data:video/mp4;base64,{base64.b64encode(clip()).decode()}"
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "what?"}]
    own, shared = (content(server.post(text=parts)) for server in both)
    assert own == shared
    assert own[0] == 200


def test_tokens_and_caches_are_reached(both: tuple[Server, Server]) -> None:
    body = {"messages": question()["messages"]}
    own, shared = (httpx.post(f"{server.url}/tokenize", json=body).json() for server in both)
    assert own == shared
    texts = [httpx.post(f"{server.url}/detokenize", json={"tokens": own["tokens"]}).json() for server in both]
    assert texts[0] == texts[1]
    assert httpx.delete(f"{both[0].url}/admin/caches/kv").status_code == 200


def test_64_streams_at_once(both: tuple[Server, Server]) -> None:
    async def ask(client: httpx.AsyncClient, server: Server, number: int) -> str:
        body = question(f"{number} and {number}?", stream=True, ignore_eos=True)
        answer = await client.post(f"{server.url}{CHAT}", json=body)
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        return streamed(answer.text)

    async def ask_all(server: Server) -> list[str]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(timeout=WAIT_S, limits=limits) as client:
            return await asyncio.gather(*(ask(client, server, number) for number in range(64)))

    own, shared = (asyncio.run(ask_all(server)) for server in both)
    assert own == shared


def test_a_client_that_leaves_ends_its_request(both: tuple[Server, Server]) -> None:
    server, body = both[0], question(stream=True, max_tokens=4000, ignore_eos=True)
    with httpx.stream("POST", f"{server.url}{CHAT}", json=body) as answer:
        pieces_of_text = answer.iter_text()
        next(pieces_of_text)
        until(lambda: server.metric("fovea:requests_running") > 0)
    until(lambda: server.metric("fovea:requests_running") == 0)


def test_the_server_imports_no_torch_and_the_engine_no_http(both: tuple[Server, Server]) -> None:
    assert "libtorch" not in Path(f"/proc/{both[0].process.pid}/maps").read_text()
    code = (
        "import sys, fovea.engine.process.host, fovea.engine.engine\n"
        "http = ('fovea.http', 'fovea.server', 'fovea.api')\n"
        "print([name for name in sys.modules if name.startswith(http)])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.strip() == "[]"


def test_if_the_engine_is_killed_streams_end_with_an_error_and_the_server_ends(simulated: Server) -> None:
    body = question(stream=True, max_tokens=4000)
    with httpx.stream("POST", f"{simulated.url}{CHAT}", json=body, timeout=WAIT_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(simulated.engine_pid, signal.SIGKILL)
        last = [line for line in lines if line][-1]
    assert "the engine stopped unexpectedly" in last
    assert simulated.process.wait(WAIT_S) == 70
    assert "SIGKILL" in simulated.log.read_text()


def test_if_the_server_is_killed_the_engine_ends(simulated: Server) -> None:
    engine = simulated.engine_pid
    simulated.process.kill()
    until(lambda: ended(engine), 30)


def test_if_the_server_is_killed_while_the_engine_loads_the_engine_ends(tmp_path: Path) -> None:
    with serving(tmp_path, "fovea-tiny", "--engine-process", "on", ready=False) as server:
        found: list[int] = []

        def begun() -> bool:
            with contextlib.suppress(AssertionError, FileNotFoundError):
                found.append(server.engine_pid)
            return bool(found)

        until(begun)
        server.process.kill()
        until(lambda: ended(found[0]), 30)


def test_after_sigterm_running_answers_are_completed(simulated: Server) -> None:
    engine, body = simulated.engine_pid, question(stream=True, max_tokens=200)
    with httpx.stream("POST", f"{simulated.url}{CHAT}", json=body, timeout=WAIT_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.killpg(simulated.process.pid, signal.SIGTERM)
        os.kill(engine, signal.SIGTERM)  # systemd sends it to all processes of a service
        text = "\n".join(lines)
    assert text.rstrip().endswith("data: [DONE]")
    assert simulated.process.wait(WAIT_S) == 0
    assert ended(engine)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with serving(tmp_path, str(tmp_path / "none"), "--engine-process", "on", ready=False) as server:
        assert server.process.wait(WAIT_S) == 2
        assert "is neither a folder" in server.log.read_text()
