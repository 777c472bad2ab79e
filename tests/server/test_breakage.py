"""Engines that fail on purpose: the answer to the client, before its first token and after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from fovea.core.errors import CheckpointError, DeadlineExceeded, EngineError, Unavailable
from fovea.core.protocols import EngineStatus
from fovea.core.types import Delta, GenerationRequest, StageTimings, Usage
from fovea.http.bodies import Message
from fovea.server.app import create_app
from tests.server.scripted import Script
from tests.server.support import chat

CHAT = "/v1/chat/completions"
LAST = Delta(0, " end", (3,), finish_reason="stop", usage=Usage(5, 2), timings=StageTimings())


def client_of(script: Script) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(script), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def events(answer: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
@pytest.mark.parametrize(
    ("error", "status", "code", "says"),
    [
        (EngineError("the request x failed"), 500, "engine_error", "the request x"),
        (CheckpointError("/secret/weights is cut off"), 500, "bad_checkpoint", "see its log"),
        (Unavailable("the engine has stopped"), 503, "unavailable", "stopped"),
        (
            DeadlineExceeded("the request's timeout ran out", param="timeout"),
            408,
            "deadline_exceeded",
            "timeout",
        ),
        (ZeroDivisionError("secret detail"), 500, "engine_error", "see its log"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_failure_before_the_first_token_is_an_http_status(
    stream: bool, error: Exception, status: int, code: str, says: str
) -> None:
    script = Script(error)
    async with client_of(script) as client:
        answer = await client.post(CHAT, json=chat(stream=stream))
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert says in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert script.closed_streams == 1


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    "error", [EngineError("boom"), DeadlineExceeded("late"), ZeroDivisionError("secret detail")]
)
async def test_failure_within_a_stream_is_its_last_event(path: str, error: Exception) -> None:
    script = Script(Delta(0, "so", (1,)), error)
    body = chat(stream=True) if path == CHAT else {"prompt": "x", "stream": True}
    async with client_of(script) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200
    *rest, last = events(answer)
    assert set(json.loads(last)["error"]) == {"message", "type", "param", "code"}
    assert "[DONE]" not in answer.text
    assert "secret" not in answer.text
    assert rest
    assert script.closed_streams == 1


async def test_successful_stream(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(Script(Delta(0, "so", (1,)), LAST)) as client:
        answer = await client.post(CHAT, json=chat(stream=True, stream_options={"include_usage": True}))
    *chunks, usage, done = events(answer)
    assert done == "[DONE]"
    assert json.loads(usage)["usage"]["total_tokens"] == 7
    assert [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "so"},
        {"content": " end"},
    ]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert not caplog.records


class HangingEngine(Script):
    """An engine that yields one delta, of a prompt of 5 tokens, and then nothing forever."""

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        try:
            yield Delta(0, "so", (1,), prompt_tokens=5)
            await asyncio.Event().wait()
        finally:
            self.closed_streams += 1


@pytest.mark.parametrize("disconnect_at", ["http.response.start", "http.response.body"])
async def test_client_disconnects_as_its_stream_begins(disconnect_at: str) -> None:
    """The first delta exists, but its event is not sent yet.

    The generator, not started yet, must be closed, too.
    """
    script = HangingEngine()
    messages = [{"type": "http.request", "body": json.dumps(chat(stream=True)).encode(), "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == disconnect_at:
            gone.set()
            await asyncio.sleep(0)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "server": ("test", 80),
        "client": ("test", 1),
    }
    app = create_app(script)
    await app(scope, receive, send)
    assert script.closed_streams == 1
    # Clients that left were once counted as errors, and their prompts not at all.
    state = app.state
    count = state.metrics.registry.get_sample_value
    assert count("fovea:finished_total", {"reason": "abort"}) == 1
    assert count("fovea:finished_total", {"reason": "error"}) is None
    assert count("fovea:tokens_total", {"kind": "prompt"}) == 5
    assert count("fovea:tokens_total", {"kind": "completion"}) == 1
    (client,) = state.access.clients
    assert (client.totals.requests, client.totals.refused) == (1, 0)
    assert (client.totals.prompt_tokens, client.totals.completion_tokens) == (5, 1)


async def test_a_deadline_tells_what_was_used() -> None:
    """A gateway bills the work of a request that its own timeout has ended by these figures."""
    async with client_of(Script(Delta(0, "so", (1,), prompt_tokens=5), DeadlineExceeded("late"))) as client:
        answer = await client.post(CHAT, json=chat(timeout=1))
    assert answer.status_code == 408
    assert answer.json()["usage"] == {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}


async def test_failure_of_one_of_several_prompts() -> None:
    async with client_of(Script(EngineError("boom"))) as client:
        answer = await client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "boom")


@pytest.mark.parametrize(("status", "says"), [("loading", "still loading"), ("stopped", "has stopped")])
async def test_engine_that_is_not_ready(status: EngineStatus, says: str) -> None:
    async with client_of(Script(LAST, status=status)) as client:
        for answer in (await client.get("/ready"), await client.post(CHAT, json=chat())):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert says in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]
        # The liveness probe fails only if the engine has stopped, because only then a restart of the process
        # helps.
        assert (await client.get("/health")).status_code == (503 if status == "stopped" else 200)
        assert (await client.get("/metrics")).status_code == 200


async def test_requests_are_counted_by_route_and_status() -> None:
    async with client_of(Script(LAST)) as client:
        await client.post(CHAT, json=chat())
        await client.post(CHAT, json={})
        await client.get("/v1/none")
        text = (await client.get("/metrics")).text
    for route, status in ((CHAT, 200), (CHAT, 400), ("unknown", 404)):
        assert f'fovea:requests_total{{route="{route}",status="{status}"}} 1.0' in text
    assert 'fovea:tokens_total{kind="completion"} 2.0' in text
    assert 'fovea:finished_total{reason="stop"} 1.0' in text
