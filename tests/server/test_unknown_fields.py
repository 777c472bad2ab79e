"""Fields that the API does not know: ignored and named, or refused, and never silently without effect."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from fovea import Engine
from fovea.api.convert import sampling
from fovea.api.explain import fields_of
from fovea.api.responses_request import ResponsesRequest
from fovea.api.schema import ChatRequest, CompletionRequest
from fovea.api.unknown import HEADER, UNSUPPORTED, ignored_fields
from fovea.api.wire import Wire
from fovea.core.errors import InvalidRequest
from fovea.core.sampling import SamplingParams
from fovea.server.settings import BodySettings, ServerSettings
from tests.server.support import Server, chat, data_url, image, picture, running, user

CHAT = "/v1/chat/completions"
GOOD = data_url(picture())


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def strict(engine: Engine, files: Path) -> Iterator[httpx.Client]:
    settings = ServerSettings(bodies=BodySettings(strict_requests=True))
    with running(engine, settings, files) as server, server.client() as client:
        yield client


NEUTRAL: list[dict[str, Any]] = [
    {"tools": None},
    {"tools": []},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tool_choice": "none"},
    {"functions": None, "function_call": "none"},
    {"modalities": ["text"]},
    {"audio": None, "web_search_options": None, "reasoning_effort": None},
    {"prediction": {"type": "content", "content": "x"}, "verbosity": "low", "store": False},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]
"""Fields that clients send without wanting anything special."""
BACK: list[dict[str, Any]] = [
    {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
    {"reasoning_content": "because", "provider_specific_fields": {"refusal": None}},
    {"reasoning": "because", "tool_calls": []},
]
"""Fields of an answer's message that clients send back."""


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_neutral_fields_are_accepted_even_strictly(strict: httpx.Client, fields: dict[str, Any]) -> None:
    answer = strict.post(CHAT, json=chat(**fields))
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers


OPENAI: dict[str, type[Any]] = {
    CHAT: chat_params.CompletionCreateParamsBase,
    "/v1/completions": text_params.CompletionCreateParamsBase,
    "/v1/responses": response_params.ResponseCreateParamsBase,
}
OFF: dict[str, list[Any]] = {
    "top_k": [-1, 0], "min_p": [0], "top_p": [1], "repetition_penalty": [1], "presence_penalty": [0],
    "frequency_penalty": [0], "seed": [-1], "max_tokens": [-1], "max_completion_tokens": [-1], "n": [1],
    "logit_bias": [{}], "stop": ["", []], "stop_token_ids": [[]], "bad_words": [[]],
    "allowed_token_ids": [[]], "min_tokens": [0], "logprobs": [False], "top_logprobs": [0],
    "response_format": [{"type": "text"}], "tools": [[]], "tool_choice": ["auto", "none"], "metadata": [{}],
    "stream": [False], "ignore_eos": [False], "skip_special_tokens": [True], "best_of": [1], "echo": [False],
    "suffix": [""], "priority": [0], "chat_template_kwargs": [{}], "user": [""], "service_tier": ["auto"],
}  # fmt: skip
"""Values by which clients of OpenAI, vLLM, SGLang and llama.cpp leave a field neutral."""


def _nullable(path: str) -> list[str]:
    """The fields that OpenAI's client declares nullable. A prompt of null is a token of OpenAI's models."""
    hints = typing.get_type_hints(OPENAI[path])
    return [name for name, kind in hints.items() if type(None) in typing.get_args(kind) and name != "prompt"]


@pytest.mark.parametrize("path", OPENAI)
def test_null_is_accepted_where_openai_accepts_it(path: str) -> None:
    """The client's own declarations are the table, so a field that a new version declares is checked, too."""
    model, least = {
        CHAT: (ChatRequest, {"messages": [user("x")]}),
        "/v1/completions": (CompletionRequest, {"prompt": "x"}),
        "/v1/responses": (ResponsesRequest, {"input": "x"}),
    }[path]
    names = _nullable(path)
    assert len(names) > 10
    for name in [*names, *(name for name in OFF if name in model.model_fields)]:
        body = model.model_validate(least | {name: None}, extra="allow")
        assert ignored_fields(body, fields_of(model), strict=True) == [], name


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in OFF for value in OFF[name]])
def test_a_value_that_asks_for_nothing_changes_nothing(name: str, value: Any) -> None:
    """`top_k: -1`, which vLLM's clients send, was refused; an empty stop string, too."""
    body = ChatRequest.model_validate({"messages": [user("x")], name: value}, extra="allow")
    assert ignored_fields(body, fields_of(ChatRequest), strict=True) == []
    assert sampling(body, {}) == SamplingParams()
    if name in CompletionRequest.model_fields and name != "logprobs":  # a number there, and 0 reports them
        assert (
            sampling(CompletionRequest.model_validate({"prompt": "x", name: value}), {}) == SamplingParams()
        )


def test_minus_one_overrides_the_checkpoints_top_k() -> None:
    body = ChatRequest.model_validate({"messages": [user("x")], "top_k": -1})
    assert sampling(body, {"top_k": 20}).top_k == 0


def test_a_text_without_a_limit_ends_with_the_context(server: Server) -> None:
    """max_tokens -1 is not OpenAI's default of 16 tokens."""
    ids = [70] * (server.engine.info.max_context - 20)
    body = {"prompt": ids, "max_tokens": -1, "temperature": 0, "ignore_eos": True}
    assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 20


WANTED: list[tuple[str, Any]] = [
    ("use_beam_search", True), ("num_beams", 4), ("length_penalty", 0.8), ("early_stopping", True),
    ("best_of", 4), ("no_repeat_ngram_size", 3), ("truncate_prompt_tokens", 10), ("mirostat", 2),
    ("dry_multiplier", 0.8), ("typical_p", 0.2), ("regex", "a+"), ("grammar", "root ::= a"),
    ("json_schema", {"type": "object"}), ("chat_template", "{{ x }}"), ("lora_path", "x"), ("echo", True),
    ("moderation", {"model": "x"}), ("conversation", "conv_1"), ("prompt", {"id": "pmpt_1"}),
    ("guidance_scale", 1.5), ("repeat_penalty", 1.1), ("mcp_servers", [{"type": "url", "url": "https://x"}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WANTED)
@pytest.mark.parametrize("model", [ChatRequest, ResponsesRequest])
def test_what_would_change_the_answer_is_refused(model: type[Wire], name: str, value: Any) -> None:
    """`use_beam_search: true` was answered with 200, and without any beam."""
    least = {"messages": [user("x")], "input": "x"}
    body = model.model_validate(least | {name: value}, extra="allow")
    with pytest.raises(InvalidRequest, match=f"{name}: .*not supported.*; accepted: null") as caught:
        ignored_fields(body, fields_of(model), strict=False)
    assert (caught.value.param, caught.value.code) == (name, "unsupported_field")
    for value in UNSUPPORTED[name][1]:
        body = model.model_validate({**least, name: value}, extra="allow")
        assert name not in ignored_fields(body, fields_of(model), strict=False)


@pytest.mark.parametrize("fields", BACK, ids=str)
def test_a_received_message_can_be_sent_back(strict: httpx.Client, fields: dict[str, Any]) -> None:
    received = {"role": "assistant", "content": "A circle.", **fields}
    answer = strict.post(CHAT, json=chat(user("what?"), received, user("sure?")))
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers


def test_parts_as_other_clients_write_them(strict: httpx.Client) -> None:
    plain = {"type": "image_url", "image_url": GOOD}
    marked = {"type": "text", "text": "what?", "cache_control": {"type": "ephemeral"}, "uuid": "one"}
    answer = strict.post(CHAT, json=chat(user(plain, marked)))
    assert answer.status_code == 200, answer.text
    usual = strict.post(CHAT, json=chat(user(image(GOOD), "what?")))
    assert answer.json()["usage"]["prompt_tokens"] == usual.json()["usage"]["prompt_tokens"]


def test_unknown_fields_are_ignored_and_named(client: httpx.Client, server: Server) -> None:
    before = server.metrics().get("fovea:ignored_fields_total", 0.0)
    message = {"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}], "mood": "good"}
    answer = client.post(CHAT, json=chat(message, guidance=1, chat_ui={"a": [1]}))
    assert answer.status_code == 200, answer.text
    assert set(answer.headers[HEADER].split(", ")) == {
        "guidance", "chat_ui", "messages[0].mood", "messages[0].content[0].colour",
    }  # fmt: skip
    assert server.metrics()["fovea:ignored_fields_total"] == before + 4


def test_a_stream_names_them_too(client: httpx.Client) -> None:
    with client.stream("POST", CHAT, json=chat(stream=True, guidance=1)) as answer:
        assert answer.headers[HEADER] == "guidance"
        assert b"[DONE]" in answer.read()


@pytest.mark.parametrize("name", ["a\r\nx-evil: 1", "ü" * 9, "x" * 100_000, "a,b"])
def test_the_header_cannot_be_forged(client: httpx.Client, name: str) -> None:
    answer = client.post(CHAT, json=chat(**{name: 1}))
    assert answer.status_code == 200
    assert "x-evil" not in answer.headers
    assert len(answer.headers[HEADER]) < 500
    assert answer.headers[HEADER].isascii()


@pytest.mark.parametrize(
    ("body", "param", "hint"),
    [
        (chat(temprature=0.5), "temprature", "temperature"),
        (chat(max_new_tokens=5), "max_new_tokens", "max_tokens"),
        (chat(user(image(GOOD, details="low"))), "messages[0].content[0].image_url.details", "detail"),
        (
            chat(stream=True, stream_options={"includeusage": True}),
            "stream_options.includeusage",
            "include_usage",
        ),
    ],
)  # fmt: skip
def test_a_misspelt_field_is_refused(client: httpx.Client, body: Any, param: str, hint: str) -> None:
    error = client.post(CHAT, json=body).json()["error"]
    assert (error["param"], error["code"]) == (param, "unknown_field")
    assert f"did you mean {hint!r}" in error["message"]


@pytest.mark.parametrize("name", ["models", "add_special_tokens"])
def test_fields_of_other_servers_are_not_taken_for_misspelt_ones(client: httpx.Client, name: str) -> None:
    answer = client.post(CHAT, json=chat(**{name: 0}))
    assert (answer.status_code, answer.headers[HEADER]) == (200, name)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(best_guess=1), "best_guess"),
        (chat(**{"x" * 500_000: 1}), "x" * 64 + "..."),
        (chat({"role": "user", "content": "x", "colour": "red"}), "messages[0].colour"),
        (chat(stream=True, stream_options={"cost": True}), "stream_options.cost"),
    ],
)  # fmt: skip
def test_strictly_every_unknown_field_is_refused(strict: httpx.Client, body: Any, param: str) -> None:
    error = strict.post(CHAT, json=body).json()["error"]
    assert (error["param"], error["code"]) == (param, "unknown_field")


RAW = GOOD.partition(",")[2]
PART = image(GOOD)
FILE = {"name": "a.png", "contentType": "image/png", "url": "https://a.example/download/7"}
PICTURES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, chat(user("x") | {"images": [RAW]}), "messages[0].images[0]"),
    (CHAT, chat(user("x") | {"images": ["https://a.example/a.png"]}), "messages[0].images[0]"),
    (CHAT, chat(user("x") | {"attachments": [{"data": GOOD}]}), "messages[0].attachments[0].data"),
    (CHAT, chat(user("x") | {"attachments": [PART]}), "messages[0].attachments[0]"),
    (CHAT, chat(user("x") | {"experimental_attachments": [FILE]}), "messages[0].experimental_attachments[0]"),
    (CHAT, chat(user("x") | {"image_url": {"url": GOOD}}), "messages[0].image_url.url"),
    (
        CHAT,
        chat(user({"type": "text", "text": "x", "image_url": {"url": GOOD}})),
        "messages[0].content[0].image_url.url",
    ),
    (CHAT, chat(user(PART | {"thumbnail": GOOD}, "x")), "messages[0].content[0].thumbnail"),
    (CHAT, chat(images=[RAW]), "images[0]"),
    (CHAT, chat(extra={"deep": [[{"photo": RAW}]]}), "extra.deep[0][0].photo"),
    (CHAT, chat(image=GOOD.replace("/", "\\/")), "image"),
    (CHAT, chat(picture=f"data:;base64,{RAW}"), "picture"),
    (CHAT, chat(other=data_url(picture(), "JPEG").partition(",")[2]), "other"),
    ("/v1/completions", {"model": "fovea-tiny", "prompt": "x", "images": [RAW]}, "images[0]"),
    ("/v1/responses", {"model": "fovea-tiny", "input": "x", "images": [RAW]}, "images[0]"),
    (
        "/v1/responses",
        {"model": "fovea-tiny", "input": [{"role": "user", "content": "x", "images": [GOOD]}]},
        "input[0].images[0]",
    ),
    (
        "/v1/messages",
        {
            "model": "fovea-tiny",
            "max_tokens": 1,
            "messages": [user("x") | {"images": [{"source": {"data": RAW}}]}],
        },
        "messages[0].images[0].source.data",
    ),
    ("/tokenize", chat(user("x") | {"images": [RAW]}), "messages[0].images[0]"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"), PICTURES, ids=[f"{path} {at}" for path, _, at in PICTURES]
)
def test_a_picture_in_an_unknown_field_is_refused(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    """Clients of other servers put pictures beside the text; the answer was about no picture at all."""
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert param in answer.text
    assert "holds a picture" in answer.text
    assert path == "/v1/messages" or answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"guidance": "data: none, so far as we know"},
        {"images": []},
        {"image": None, "video": False, "picture": "a cat"},
        {"homepage": "https://a.example/a.png", "format_of": {"type": "image"}},
        {"token": RAW[40:400], "guesses": {"properties": {"image_url": {"type": "string"}}}},
        {"metadata": {"thumbnail": RAW[:500]}},
    ],
    ids=lambda fields: ", ".join(fields),
)
def test_other_unknown_fields_stay_as_they_are(client: httpx.Client, fields: dict[str, Any]) -> None:
    answer = client.post(CHAT, json=chat(**fields))
    assert answer.status_code == 200, answer.text
    assert set(answer.headers.get(HEADER, "metadata").split(", ")) == set(fields)


def test_a_picture_in_a_text_is_text(client: httpx.Client) -> None:
    """Declared fields are read, so nothing in them gets lost."""
    assert client.post(CHAT, json=chat(user(GOOD[:2000]))).status_code == 200
