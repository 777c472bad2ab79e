"""Lines of a batch over HTTP: what is sent, what is sent again, what ends a line, and what ends the run."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fovea.api.questions import Stopped
from fovea.cluster.batch_http import (
    ATTEMPTS,
    HttpClient,
    HttpOptions,
    HttpRunner,
    Reply,
    Unreachable,
    http_params,
)
from fovea.core.constraints import AnswerFormat
from fovea.core.errors import InvalidImage, InvalidRequest
from fovea.core.media import PixelBudget
from tests.support.servers import forked, free_port

IMAGES = {"a.png": b"pixels of a", "b.jpg": b"pixels of b"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
GONE, CUT = Unreachable("no one is there", connected=False), Unreachable("cut off", connected=True)


def answer(*texts: str) -> Reply:
    choices = [
        {"index": index, "message": {"content": text}, "finish_reason": "stop"}
        for index, text in enumerate(texts)
    ]
    return Reply(200, json.dumps({"choices": choices[::-1], "usage": USAGE}).encode())


def refusal(status: int, retry_after: float | None = None, **fields: Any) -> Reply:
    error = {"message": "no", "type": "t", "param": "p", "code": "c"} | fields
    return Reply(status, json.dumps({"error": error}).encode(), retry_after)


def read_image(name: str) -> bytes:
    if name not in IMAGES:
        raise InvalidImage(f"{name} cannot be read: it is not there")
    return IMAGES[name]


class Engine:
    """Answers with scripted replies, the last one again and again, and records requests and pauses."""

    def __init__(self, *script: Reply | Exception, **options: Any) -> None:
        self._script = list(script)
        self.requests: list[tuple[str, Any]] = []
        self.pauses: list[float] = []
        self.now = 0.0
        options = {"model": "m", "prompt": "what?"} | options
        self.runner = HttpRunner(
            HttpOptions("http://engine", **options),
            read_image,
            self._send,
            clock=lambda: self.now,
            sleep=self._sleep,
        )

    async def _send(self, path: str, body: bytes | None) -> Reply:
        self.requests.append((path, None if body is None else json.loads(body)))
        reply = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def ask(self, **fields: Any) -> dict[str, Any]:
        return await self.runner.answer(7, json.dumps(fields).encode())


async def test_an_answer() -> None:
    engine = Engine(answer("yes"), params={"max_tokens": 5}, detail="low")
    assert await engine.ask(id="x", image="a.png", params={"seed": 1}) == {
        "line": 7, "id": "x", "text": "yes", "finish_reason": "stop", "usage": USAGE,
    }  # fmt: skip
    url = f"data:image/png;base64,{base64.b64encode(IMAGES['a.png']).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "text", "text": "what?"},
    ]
    body = {"model": "m", "max_tokens": 5, "seed": 1, "messages": [{"role": "user", "content": content}]}
    assert engine.requests == [("/v1/chat/completions", body)]


async def test_several_texts_are_in_the_order_of_their_choices() -> None:
    engine = Engine(answer("one", "two"))
    body = await engine.ask(question="q", params={"n": 2})
    assert (body["id"], body["texts"], body["finish_reasons"]) == (7, ["one", "two"], ["stop", "stop"])


async def test_messages() -> None:
    engine = Engine(answer("yes"))
    parts = [{"type": "image", "image": "b.jpg"}, {"type": "text", "text": "what?"}]
    await engine.ask(messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}])
    [(_, body)] = engine.requests
    url = f"data:image/jpeg;base64,{base64.b64encode(IMAGES['b.jpg']).decode()}"
    assert body["messages"] == [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, parts[1]]},
        {"role": "assistant", "content": "red"},
    ]


async def test_the_model_is_asked_for_once() -> None:
    models = Reply(200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())
    engine = Engine(models, answer("yes"), model=None)
    await engine.ask(question="a")
    await engine.ask(question="b")
    assert [path for path, _ in engine.requests] == ["/v1/models", *["/v1/chat/completions"] * 2]
    assert [body["model"] for _, body in engine.requests[1:]] == ["first", "first"]


@pytest.mark.parametrize("reply", [Reply(200, b"{}"), Reply(200, b"not JSON"), refusal(400)])
async def test_a_server_without_models_ends_the_run(reply: Reply) -> None:
    with pytest.raises(Stopped, match="http://engine names no model: .*--model can name it"):
        await Engine(reply, model=None).ask(question="a")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"image": "missing.png"}, "image 0: missing.png cannot be read: it is not there"),
        ({"images": ["a.png", "missing.png"]}, "image 1: missing.png cannot be read: it is not there"),
        ({"image": 3}, "image takes a path"),
        ({"question": "a", "params": {"stream": True}}, "params.stream cannot be set in a batch"),
        ({"question": "a", "other": 1}, "unknown field 'other'"),
    ],
)
async def test_a_wrong_line_is_not_sent(line: Any, message: str) -> None:
    engine = Engine(answer("yes"))
    body = await engine.ask(**line)
    assert message in body["error"]["message"]
    assert engine.requests == []


async def test_a_refusal_is_the_error_of_the_line() -> None:
    engine = Engine(refusal(400))
    body = await engine.ask(question="a")
    assert body["error"] == {"message": "no", "type": "t", "param": "p", "code": "c"}
    assert len(engine.requests) == 1


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices": [{}]}', b'{"choices": null}'])
async def test_another_answer_is_an_error_of_the_line(body: bytes) -> None:
    assert "not a chat completion" in (await Engine(Reply(200, body)).ask(question="a"))["error"]["message"]


@pytest.mark.parametrize(
    ("script", "pauses"),
    [
        ([GONE, GONE, GONE], [0.5, 1.0, 2.0]),
        ([refusal(429, 3.0), refusal(503), refusal(429, 9999.0)], [3.0, 1.0, 30.0]),
        ([CUT, refusal(500), refusal(502), refusal(504)], [0.5, 1.0, 2.0, 4.0]),
    ],
)
async def test_what_lies_with_the_engines_is_sent_again(
    script: Sequence[Any], pauses: Sequence[float]
) -> None:
    engine = Engine(*script, answer("yes"))
    assert (await engine.ask(question="a"))["text"] == "yes"
    assert engine.pauses == pauses


@pytest.mark.parametrize(("reply", "cause"), [(refusal(500), "no"), (CUT, "cut off")])
async def test_a_line_that_fails_again_and_again_is_an_error(reply: Any, cause: str) -> None:
    engine = Engine(reply)
    body = await engine.ask(question="a")
    assert body["error"]["message"] == f"{ATTEMPTS} attempts failed, the last one: {cause}"
    assert len(engine.requests) == ATTEMPTS


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_wrong_key_or_model_ends_the_run(status: int) -> None:
    with pytest.raises(Stopped, match=f"http://engine answers {status}: no"):
        await Engine(refusal(status)).ask(question="a")


@pytest.mark.parametrize(("reply", "cause"), [(GONE, "no one is there"), (refusal(503), "no")])
async def test_silent_engines_end_the_run(reply: Any, cause: str) -> None:
    engine = Engine(reply, patience_s=60.0)
    with pytest.raises(Stopped, match=f"http://engine has answered no request for [0-9]+ s: {cause}"):
        await engine.ask(question="a")
    assert 60 < engine.now < 95


async def test_patience_begins_again_with_each_answer() -> None:
    """The engines are away twice for 45 s, and answer in between."""
    pauses = [GONE] * 6
    engine = Engine(*pauses, answer("one"), *pauses, answer("two"), patience_s=60.0)
    assert (await engine.ask(question="a"))["text"] == "one"
    assert (await engine.ask(question="b"))["text"] == "two"
    assert engine.now > 60


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: AnswerFormat.json_schema({"type": "object"}), {"json": {"type": "object"}}),
        (lambda: AnswerFormat.choice(["a", "b"]), {"choice": ["a", "b"]}),
        (lambda: AnswerFormat.regex("a+"), {"regex": "a+"}),
        (lambda: AnswerFormat.grammar('start: "a"'), {"grammar": 'start: "a"'}),
    ],
)
def test_forms_of_an_answer_over_http(make: Callable[[], AnswerFormat], fields: Any) -> None:
    sampling = {"max_tokens": 4, "temperature": 0.0, "format": make()}
    assert http_params(sampling, PixelBudget(max_pixels=100)) == {
        "max_tokens": 4, "temperature": 0.0, "max_pixels": 100, "structured_outputs": fields,
    }  # fmt: skip


def test_wrong_parameters_are_an_error_before_anything_is_sent() -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        http_params({"temperature": 7.0}, PixelBudget())


async def test_a_real_server_over_real_connections(tmp_path: Path) -> None:
    """All fields that flags can set are fields of the server; a bad image is a line; then the server ends."""
    data = io.BytesIO()
    Image.new("RGB", (32, 32)).save(data, "png")
    images = {"good.png": data.getvalue(), "bad.png": b"no image"}
    sampling = {"max_tokens": 2, "temperature": 0.0, "top_p": 0.5, "seed": 3}
    port = free_port()
    options = HttpOptions(
        f"http://127.0.0.1:{port}/v1/",
        params=http_params(sampling, PixelBudget(max_pixels=1024)),
        detail="low",
        prompt="what?",
        patience_s=0.0,
    )
    client = HttpClient(options)
    runner = HttpRunner(options, images.__getitem__, client.send)
    with forked(["serve", "--simulate", "--port", str(port)], port, tmp_path / "log"):
        good = await runner.answer(1, b'{"image": "good.png"}')
        assert (good["finish_reason"], good["usage"]["completion_tokens"]) == ("length", 2)
        assert good["usage"]["prompt_tokens_details"]["image_tokens"] > 0
        bad = await runner.answer(2, b'{"image": "bad.png", "id": "x"}')
        assert (bad["id"], bad["error"]["code"]) == ("x", "unsupported_image_type")
    with pytest.raises(Stopped, match="has answered no request"):
        await runner.answer(3, b'{"image": "good.png"}')
    await client.close()
