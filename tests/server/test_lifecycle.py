"""Disconnects, timeouts, full queues and draining: every request ends, and its memory is freed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
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
from tests.support.forks import Fork

CHAT = "/v1/chat/completions"
ENDLESS = 3500
"""Tokens of an answer that takes seconds. The tests abort it after milliseconds."""


@pytest.fixture(scope="module")
def narrow(checkpoint: Path, files: Path) -> Iterator[Server]:
    """A server with room for one running and one waiting sequence. It refuses a third one."""
    with (
        Engine.from_pretrained(
            str(checkpoint), dtype="float32", threads=1, kv_cache_mib=32, max_running=1, max_queue=1
        ) as engine,
        running(engine, ServerSettings(), files) as server,
    ):
        yield server


@contextlib.contextmanager
def streaming(server: Server, **extra: Any) -> Iterator[Iterator[str]]:
    """Start a stream and yield its remaining lines.

    Its first event has arrived, so the engine has the request.
    """
    body = chat(**{"stream": True, "max_tokens": ENDLESS, **extra})
    with server.client() as client, client.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def send_without_reading(server: Server, body: dict[str, Any]) -> socket.socket:
    """Send a request without reading the answer. Closing the returned socket disconnects the client."""
    content = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    wire = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE)
    wire.sendall(head.encode() + content)
    return wire


def count_ended(server: Server, status: int) -> float:
    """The number of chat requests that ended with this status."""
    registry = server.app.state.metrics.registry
    return registry.get_sample_value("fovea:requests_total", {"route": CHAT, "status": str(status)}) or 0.0


def assert_all_is_freed(server: Server) -> None:
    until(lambda: not server.metrics()["fovea:requests_running"])
    until(lambda: not server.metrics()["fovea:kv_blocks_used"])
    metrics = server.metrics()
    assert metrics["fovea:requests_waiting"] == 0
    assert metrics["fovea:integrity_errors_total"] == 0
    server.engine.check_integrity()


def test_disconnect_within_a_stream_frees_blocks(server: Server) -> None:
    before = server.metrics()["fovea:generation_tokens_total"]
    over = count_ended(server, 200)
    with streaming(server, messages=[user(image(data_url(picture(seed=90))), "what is it?")]) as lines:
        next(lines)
        assert server.metrics()["fovea:kv_blocks_used"] > 0
        freeze = contextlib.ExitStack()
        freeze.enter_context(frozen(server.engine))
    until(lambda: count_ended(server, 200) == over + 1)
    freeze.close()
    assert_all_is_freed(server)
    assert server.metrics()["fovea:generation_tokens_total"] - before < ENDLESS


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
def test_disconnect_before_the_first_token_leaves_the_queue(narrow: Server, stream: bool) -> None:
    gone = count_ended(narrow, 499)
    with streaming(narrow):
        wire = send_without_reading(narrow, chat(max_tokens=ENDLESS, stream=stream))
        until(lambda: narrow.metrics()["fovea:requests_waiting"] == 1)
        wire.close()
        until(lambda: count_ended(narrow, 499) == gone + 1)
        until(lambda: narrow.metrics()["fovea:requests_waiting"] == 0)
    assert_all_is_freed(narrow)


def test_disconnect_before_a_complete_answer_frees_blocks(server: Server) -> None:
    before = server.metrics()["fovea:generation_tokens_total"]
    gone = count_ended(server, 499)
    wire = send_without_reading(server, chat(max_tokens=ENDLESS, n=2))
    until(lambda: server.metrics()["fovea:generation_tokens_total"] > before)
    with frozen(server.engine):
        wire.close()
        until(lambda: count_ended(server, 499) == gone + 1)
    assert_all_is_freed(server)
    assert server.metrics()["fovea:generation_tokens_total"] - before < 2 * ENDLESS


def test_disconnect_frees_all_prompts_of_a_request(server: Server) -> None:
    before = server.metrics()["fovea:generation_tokens_total"]
    body = {"prompt": ["the", "red", "circle"], "max_tokens": ENDLESS, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        server.post("/v1/completions", body, timeout=0.25)
    assert_all_is_freed(server)
    assert server.metrics()["fovea:generation_tokens_total"] - before < 3 * ENDLESS


def test_full_queue_sends_retry_after(narrow: Server) -> None:
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
    assert_all_is_freed(narrow)
    assert narrow.post(CHAT, chat()).status_code == 200


def test_timeout_of_a_request(server: Server) -> None:
    answer = server.post(CHAT, chat(timeout=1e-6))
    assert answer.status_code == 408
    assert answer.json()["error"] == {
        "message": "the request's timeout ran out",
        "type": "timeout_error",
        "param": "timeout",
        "code": "deadline_exceeded",
    }
    assert_all_is_freed(server)


@pytest.fixture
def patient(engine: Engine, files: Path) -> Iterator[Server]:
    """A server that fetches images from any host and waits a minute for them."""
    media = MediaLimits(allow_private_hosts=True, fetch_timeout_s=60)
    with running(engine, ServerSettings(media=media), files) as server:
        yield server


def test_timeout_while_an_image_is_fetched(patient: Server, web: Web) -> None:
    answer = patient.post(CHAT, chat(user(image(f"{web.url}/slow.png")), timeout=0.2))
    assert answer.status_code == 408
    assert answer.json()["error"]["param"] == "timeout"
    assert "images" in answer.json()["error"]["message"]


def test_disconnect_while_an_image_is_fetched(patient: Server, web: Web) -> None:
    wire = send_without_reading(patient, chat(user(image(f"{web.url}/slow.png"))))
    assert web.requested.wait(PATIENCE)
    wire.close()
    until(lambda: count_ended(patient, 499) == 1)


def test_server_timeout_applies_to_requests_without_their_own(engine: Engine, files: Path) -> None:
    with running(engine, ServerSettings(request_timeout=1e-6), files) as server:
        assert server.post(CHAT, chat()).status_code == 408
        assert server.post(CHAT, chat(timeout=600)).status_code == 200


def test_operator_routes(server: Server) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ready", "model": "tiny"}
    assert server.get("/v2/health/live").json() == {"status": "ok"}
    assert server.get("/v2/health/ready").json() == {"status": "ready", "model": "tiny"}
    assert set(server.get("/version").json()) == {"version"}
    metrics = server.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "\nfovea:ready 1.0" in metrics.text


def test_draining_server_finishes_running_requests_only(engine: Engine, files: Path) -> None:
    with running(engine, ServerSettings(), files) as server, streaming(server, max_tokens=200) as lines:
        server.app.state.draining = True
        for path, body in (
            (CHAT, chat()),
            ("/v1/completions", {"prompt": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            refused = server.post(path, body)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "unavailable"
        for probe in ("/ready", "/v2/health/ready"):
            assert server.get(probe).status_code == 503
        assert "\nfovea:ready 0.0" in server.get("/metrics").text
        for probe in ("/health", "/v2/health/live"):
            assert server.get(probe).status_code == 200
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
settings = ServerSettings.of(drain_seconds=float(sys.argv[3]), lame_duck_s=0)
serve(create_app(engine, settings), "127.0.0.1", int(sys.argv[2]))
"""


@contextlib.contextmanager
def process(checkpoint: Path, drain_seconds: float) -> Iterator[tuple[Fork, httpx.Client]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = Fork(SERVE, [str(checkpoint), str(port), str(drain_seconds)], os.environ)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            until(lambda: child.poll() is not None or is_ready(client))
            yield child, client
    finally:
        child.kill()
        child.communicate()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_sigterm_lets_a_running_stream_finish(checkpoint: Path) -> None:
    body = chat(stream=True, max_tokens=240, stream_options={"include_usage": True})
    with process(checkpoint, 60) as (child, client):
        with client.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            until(lambda: not is_ready(client))
            rest = [json.loads(line[6:]) if line != "data: [DONE]" else None for line in lines if line]
        assert rest[-1] is None
        assert rest[-2]["usage"]["completion_tokens"] == 240
        assert rest[-3]["choices"][0]["finish_reason"] == "length"
        assert child.wait(PATIENCE) == 0


def test_sigterm_aborts_streams_after_the_drain_time(checkpoint: Path) -> None:
    with process(checkpoint, 0) as (child, client):
        read: list[str] = []
        with client.stream("POST", CHAT, json=chat(stream=True, max_tokens=ENDLESS)) as answer:
            for line in answer.iter_lines():
                if not read:
                    child.send_signal(signal.SIGTERM)
                read.append(line)
        last = [line for line in read if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert child.wait(PATIENCE) == 0


def test_sigterm_ends_an_idle_server_at_once(checkpoint: Path) -> None:
    with process(checkpoint, 600) as (child, _):
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 0
