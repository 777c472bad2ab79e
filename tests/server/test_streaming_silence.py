"""Streams whose first token takes long: a comment keeps the connection open until the answer begins."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator

import httpx
import pytest
import uvloop

from fovea.api import sse
from fovea.core.errors import DeadlineExceeded, EngineError
from fovea.core.types import Delta, GenerationRequest, StageTimings, Usage
from fovea.server import generation as streaming
from fovea.server.app import create_app
from fovea.server.run import serving
from tests.server.scripted import Script
from tests.server.support import PATIENCE, Json, chat, until

LAST = Delta(0, " end", (2,), finish_reason="stop", usage=Usage(5, 2), timings=StageTimings())
ROUTES: dict[str, Json] = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": chat()["messages"], "max_tokens": 4},
}
COMMENT = sse.COMMENT.decode()


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SILENCE_S", 0.05)


class LateEngine(Script):
    """An engine that waits before each of its deltas and errors."""

    wait_s = 0.2

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        try:
            for step in self._steps:
                await asyncio.sleep(self.wait_s)
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.closed_streams += 1


async def post(engine: Script, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(engine), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json={**ROUTES[path], "stream": True})


def without_comments(text: str) -> str:
    return text.replace(COMMENT, "")


def payloads(answer: httpx.Response) -> list[Json]:
    return [json.loads(payload) for payload in sse.Decoder().feed(answer.content) if payload != "[DONE]"]


@pytest.mark.parametrize("path", ROUTES)
async def test_comments_come_before_the_first_event(path: str) -> None:
    late = await post(LateEngine(Delta(0, "so", (1,)), LAST), path)
    soon = await post(Script(Delta(0, "so", (1,)), LAST), path)
    assert late.status_code == 200
    assert late.headers["content-type"].startswith("text/event-stream")
    assert late.text.startswith(COMMENT)
    assert COMMENT not in soon.text
    late_kinds, soon_kinds = (
        [payload.get("type", list(payload)) for payload in payloads(answer)] for answer in (late, soon)
    )
    assert late_kinds == soon_kinds
    assert without_comments(late.text).endswith("data: [DONE]\n\n") == soon.text.endswith("data: [DONE]\n\n")


async def test_quick_answers_have_no_comment() -> None:
    answer = await post(Script(Delta(0, "so", (1,)), LAST), "/v1/chat/completions")
    assert COMMENT not in answer.text


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "error", [DeadlineExceeded("late"), EngineError("boom"), ZeroDivisionError("secret")]
)
async def test_error_after_the_silence_becomes_an_event(path: str, error: Exception) -> None:
    """The status was sent already, so the error is the stream's last event, without a mark of the end."""
    engine = LateEngine(error)
    answer = await post(engine, path)
    assert answer.status_code == 200
    assert answer.text.startswith(COMMENT)
    [last] = payloads(answer)
    inner = last.get("error", last)
    assert inner["message"]
    assert "secret" not in answer.text
    assert "[DONE]" not in answer.text
    assert engine.closed_streams == 1
    if path in ("/v1/responses", "/v1/messages"):
        assert last["type"] == "error"


@pytest.mark.parametrize("path", ROUTES)
async def test_error_before_the_silence_is_a_status(path: str) -> None:
    answer = await post(Script(DeadlineExceeded("late")), path)
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "deadline_exceeded"


class SilentEngine(Script):
    """An engine that never answers. begun: set when it has got a request."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        try:
            self.begun.set()
            await asyncio.Event().wait()
            yield LAST
        finally:
            self.closed_streams += 1


@pytest.mark.parametrize("path", ROUTES)
def test_client_that_leaves_during_the_silence_ends_the_generation(path: str) -> None:
    engine = SilentEngine()
    with serving(create_app(engine), uvloop.new_event_loop) as url:
        body = {**ROUTES[path], "stream": True}
        with httpx.stream("POST", url + path, json=body, timeout=PATIENCE) as answer:
            assert answer.status_code == 200
            pieces = answer.iter_text()  # the connection is closed with this iterator
            assert next(pieces).startswith(COMMENT)
            assert engine.closed_streams == 0
        until(lambda: engine.closed_streams == 1)


def test_client_that_leaves_before_any_byte_ends_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SILENCE_S", PATIENCE)
    engine = SilentEngine()
    with serving(create_app(engine), uvloop.new_event_loop) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + "/v1/chat/completions", json=chat(stream=True), timeout=0.3)
        assert engine.begun.is_set()
        until(lambda: engine.closed_streams == 1)
