"""From the key at the door to the drain at the end: what a client holds is freed, and nobody is left hanging."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fovea import Engine
from fovea.media.limits import MediaLimits
from fovea.server.settings import ServerSettings
from tests.server.conftest import Web
from tests.server.support import (
    PATIENCE,
    Server,
    chat,
    data_url,
    frozen,
    image,
    picture,
    running,
    until,
    user,
)

CHAT = "/v1/chat/completions"
ENDLESS = 3500
"""Tokens of an answer that nobody waits for: seconds of work where a test needs milliseconds."""


@pytest.fixture(scope="module")
def narrow(checkpoint: Path, files: Path) -> Iterator[Server]:
    """One sequence runs, one waits, a third is refused."""
    with (
        Engine.from_pretrained(
            str(checkpoint), dtype="float32", threads=1, kv_cache_mib=32, max_running=1, max_queue=1
        ) as engine,
        running(engine, ServerSettings(), files) as server,
    ):
        yield server


@contextlib.contextmanager
def streaming(server: Server, **extra: Any) -> Iterator[Iterator[str]]:
    """A stream whose first event has arrived: its request is in the engine."""
    body = chat(**{"stream": True, "max_tokens": ENDLESS, **extra})
    with server.client() as client, client.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def send_and_leave(server: Server, body: dict[str, Any]) -> socket.socket:
    """A request whose answer is not read; closing the socket is how its client leaves."""
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    wire = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE)
    wire.sendall(head.encode() + content)
    return wire


def ended(server: Server, status: int) -> float:
    """Chat requests that ended with this status."""
    registry = server.app.state.fovea.metrics.registry
    return registry.get_sample_value("fovea:requests_total", {"route": CHAT, "status": str(status)}) or 0.0


def assert_nothing_is_held(server: Server) -> None:
    until(lambda: not server.metrics()["fovea:requests_running"])
    until(lambda: not server.metrics()["fovea:kv_blocks_used"])
    numbers = server.metrics()
    assert numbers["fovea:requests_waiting"] == 0
    assert numbers["fovea:integrity_errors_total"] == 0
    server.engine.check_integrity()


def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_its_blocks(server: Server) -> None:
    before = server.metrics()["fovea:generation_tokens_total"]
    over = ended(server, 200)
    with streaming(server, messages=[user(image(data_url(picture(seed=90))), "what is it?")]) as lines:
        next(lines)
        assert server.metrics()["fovea:kv_blocks_used"] > 0
        freeze = contextlib.ExitStack()
        freeze.enter_context(frozen(server.engine))
    until(lambda: ended(server, 200) == over + 1)
    freeze.close()
    assert_nothing_is_held(server)
    assert server.metrics()["fovea:generation_tokens_total"] - before < ENDLESS


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_before_its_first_token_is_taken_from_the_queue(
    narrow: Server, stream: bool
) -> None:
    gone = ended(narrow, 499)
    with streaming(narrow):
        wire = send_and_leave(narrow, chat(max_tokens=ENDLESS, stream=stream))
        until(lambda: narrow.metrics()["fovea:requests_waiting"] == 1)
        wire.close()
        until(lambda: ended(narrow, 499) == gone + 1)
        until(lambda: narrow.metrics()["fovea:requests_waiting"] == 0)
    assert_nothing_is_held(narrow)


def test_a_client_that_leaves_a_whole_answer_frees_its_blocks(server: Server) -> None:
    before = server.metrics()["fovea:generation_tokens_total"]
    gone = ended(server, 499)
    wire = send_and_leave(server, chat(max_tokens=ENDLESS, n=2))
    until(lambda: server.metrics()["fovea:generation_tokens_total"] > before)
    with frozen(server.engine):
        wire.close()
        until(lambda: ended(server, 499) == gone + 1)
    assert_nothing_is_held(server)
    assert server.metrics()["fovea:generation_tokens_total"] - before < 2 * ENDLESS


def test_a_client_that_leaves_several_prompts_frees_all_of_them(server: Server) -> None:
    before = server.metrics()["fovea:generation_tokens_total"]
    body = {"prompt": ["the", "red", "circle"], "max_tokens": ENDLESS, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        server.post("/v1/completions", body, timeout=0.5)
    assert_nothing_is_held(server)
    assert server.metrics()["fovea:generation_tokens_total"] - before < 3 * ENDLESS


def test_a_full_queue_says_when_to_come_again(narrow: Server) -> None:
    with streaming(narrow, n=2) as lines, frozen(narrow.engine):
        for stream in (False, True):
            refused = narrow.post(CHAT, chat(stream=stream))
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert refused.json()["error"]["code"] == "overloaded"
        with (
            openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.RateLimitError),
        ):
            client.chat.completions.create(model="tiny", messages=[user("hi")])
        assert lines
    assert_nothing_is_held(narrow)
    assert narrow.post(CHAT, chat()).status_code == 200


def test_a_timeout_ends_a_request(server: Server) -> None:
    answer = server.post(CHAT, chat(timeout=1e-6))
    assert answer.status_code == 408
    assert answer.json()["error"] == {
        "message": "the request's timeout ran out",
        "type": "timeout_error",
        "param": "timeout",
        "code": "deadline_exceeded",
    }
    assert_nothing_is_held(server)


@pytest.fixture
def patient(engine: Engine, files: Path) -> Iterator[Server]:
    """Waits a minute for a picture, from whatever host."""
    media = MediaLimits(allow_private_hosts=True, fetch_timeout_s=60)
    with running(engine, ServerSettings(media=media), files) as server:
        yield server


def test_a_timeout_ends_the_wait_for_an_image(patient: Server, web: Web) -> None:
    answer = patient.post(CHAT, chat(user(image(f"{web.url}/slow.png")), timeout=0.2))
    assert answer.status_code == 408
    assert answer.json()["error"]["param"] == "timeout"
    assert "images" in answer.json()["error"]["message"]


def test_a_client_that_leaves_while_its_image_is_fetched(patient: Server, web: Web) -> None:
    wire = send_and_leave(patient, chat(user(image(f"{web.url}/slow.png"))))
    assert web.asked.wait(PATIENCE)
    wire.close()
    until(lambda: ended(patient, 499) == 1)


def test_the_servers_timeout_is_for_requests_that_name_none(engine: Engine, files: Path) -> None:
    with running(engine, ServerSettings(request_timeout=1e-6), files) as server:
        assert server.post(CHAT, chat()).status_code == 408
        assert server.post(CHAT, chat(timeout=600)).status_code == 200


def test_operators_see_what_runs(server: Server) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ready", "model": "tiny"}
    assert set(server.get("/version").json()) == {"version"}
    assert server.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_while_it_drains_only_what_runs_goes_on(engine: Engine, files: Path) -> None:
    with running(engine, ServerSettings(), files) as server, streaming(server, max_tokens=200) as lines:
        server.app.state.fovea.draining = True
        for path, body in (
            (CHAT, chat()),
            ("/v1/completions", {"prompt": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            refused = server.post(path, body)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "unavailable"
        assert server.get("/ready").status_code == 503
        assert server.get("/health").status_code == 200
        assert server.get("/v1/models").status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]"


SERVE = """
import sys
from fovea import Engine
from fovea.server.app import create_app
from fovea.server.run import serve
from fovea.media.limits import MediaLimits
from fovea.server.settings import ServerSettings
engine = Engine.from_pretrained(sys.argv[1], dtype="float32", threads=1, kv_cache_mib=32)
serve(create_app(engine, ServerSettings(drain_seconds=float(sys.argv[3]))), "127.0.0.1", int(sys.argv[2]))
"""


@contextlib.contextmanager
def process(checkpoint: Path, drain_seconds: float) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, str(checkpoint), str(port), str(drain_seconds)]
    child = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            until(lambda: child.poll() is not None or is_ready(client))
            yield child, client
    finally:
        child.kill()
        child.wait()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_sigterm_lets_a_running_stream_finish(checkpoint: Path) -> None:
    body = chat(stream=True, max_tokens=600, stream_options={"include_usage": True})
    with process(checkpoint, 60) as (child, client):
        with client.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            until(lambda: not is_ready(client))
            rest = [json.loads(line[6:]) if line != "data: [DONE]" else None for line in lines if line]
        assert rest[-1] is None
        assert rest[-2]["usage"]["completion_tokens"] == 600
        assert rest[-3]["choices"][0]["finish_reason"] == "length"
        assert child.wait(PATIENCE) == 0


def test_sigterm_cuts_off_what_takes_too_long(checkpoint: Path) -> None:
    with process(checkpoint, 0) as (child, client):
        read: list[str] = []
        with (
            contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError),
            client.stream("POST", CHAT, json=chat(stream=True, max_tokens=ENDLESS)) as answer,
        ):
            for line in answer.iter_lines():
                if not read:
                    child.send_signal(signal.SIGTERM)
                read.append(line)
        assert read
        assert "data: [DONE]" not in read
        assert child.wait(PATIENCE) == 0


def test_an_idle_server_exits_at_once(checkpoint: Path) -> None:
    with process(checkpoint, 600) as (child, _):
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 0
