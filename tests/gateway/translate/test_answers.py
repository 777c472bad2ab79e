"""Complete answers and errors of backends in the forms of the other APIs."""

from __future__ import annotations

from typing import Any

import pytest

from fovea.core.errors import Overloaded
from fovea.gateway.translate.chat_reader import BackendError
from fovea.gateway.translate.translation import Api
from tests.gateway.translate.support import APIS, USAGE, Json, call, numbered, translation


def chat(message: Json, reason: str = "stop", **fields: Any) -> Json:
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason}], **fields}


def message(body: Json) -> Json:
    return translation("messages").answer(200, body, ids=numbered())


def response(body: Json) -> Json:
    return translation("responses").answer(200, body, ids=numbered(), clock=lambda: 7.5)


CALLED = {**call(0, '{"a": 1}', id="x", name="f"), "content": "So:", "reasoning": "hm", "role": "assistant"}


def test_message() -> None:
    assert message(chat(CALLED, "tool_calls", usage=USAGE, model="n", fovea={"a": 1}, more=3)) == {
        "id": "msg_0",
        "type": "message",
        "role": "assistant",
        "model": "n",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "So:", "citations": None},
            {"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 7,
            "cache_read_input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "output_tokens": 4,
        },
        "fovea": {"a": 1},
    }


def test_response() -> None:
    body = response(chat(CALLED, "tool_calls", usage=USAGE))
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
    assert (body["model"], body["created_at"], body["status"]) == ("m", 7, "completed")
    assert body["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {
            "cached_tokens": 2,
            "cache_write_tokens": 0,
            "image_tokens": 3,
            "dropped_tokens": 0,
        },
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }


def test_log_probabilities() -> None:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    body = chat({"content": "a"})
    body["choices"][0]["logprobs"] = {"content": [entry]}
    assert response(body)["output"][0]["content"][0]["logprobs"] == [entry]


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": "9"}, {"prompt_tokens_details": None}, 5])
def test_usage_may_be_missing(usage: Any) -> None:
    body = chat({"content": "a"}, usage=usage)
    assert message(body)["usage"]["input_tokens"] == 0
    assert (response(body)["usage"] is None) == (not isinstance(usage, dict))


@pytest.mark.parametrize(
    "forms",
    [
        {"tool_calls": [{"id": "0", "function": {"name": name, "arguments": {}}} for name in "fg"]},
        {"tool_calls": [{"index": 0, "function": {"name": name, "arguments": "{}"}} for name in "fg"]},
    ],
    ids=["one id, and objects", "one index, and no ids"],
)
def test_every_call_of_a_whole_answer_is_one(forms: Json) -> None:
    blocks = message(chat({"content": None, **forms}))["content"]
    assert [(block["name"], block["input"]) for block in blocks] == [("f", {}), ("g", {})]
    assert len({block["id"] for block in blocks}) == 2


def test_arguments_that_the_limit_has_cut() -> None:
    body = chat(call(0, '{"a": ', id="x", name="f"), "length")
    assert message(body)["content"][0]["input"] == {}
    assert message(body)["stop_reason"] == "max_tokens"
    assert response(body)["output"][0]["arguments"] == '{"a": '
    assert response(body)["status"] == "incomplete"


@pytest.mark.parametrize(
    "body",
    [
        None, [], {}, {"choices": []}, {"choices": [{}]}, {"choices": [{"message": 5}]}, chat({}, "error"),
        {"choices": [{"message": {"content": "a"}}]}, {"error": {"message": "no"}}, {"error": "no"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("api", APIS)
def test_what_is_no_answer_raises(api: Api, body: Any) -> None:
    with pytest.raises(BackendError) as caught:
        translation(api).answer(200, body)
    assert caught.value.status == 502


def test_values_that_are_nested_too_deeply() -> None:
    deep: Json = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(BackendError, match="nested too deeply"):
        message(chat({"content": "a"}, fovea=deep))


KINDS = [
    (400, "invalid_request_error", "invalid_request_error"),
    (401, "authentication_error", "authentication_error"),
    (403, "permission_error", "permission_error"),
    (404, "not_found_error", "not_found_error"),
    (413, "request_too_large", "invalid_request_error"),
    (422, "invalid_request_error", "invalid_request_error"),
    (429, "rate_limit_error", "rate_limit_error"),
    (500, "api_error", "server_error"),
    (503, "overloaded_error", "unavailable_error"),
    (529, "overloaded_error", "server_error"),
]


@pytest.mark.parametrize(("status", "anthropic", "openai"), KINDS)
def test_types_of_errors(status: int, anthropic: str, openai: str) -> None:
    body = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": status}}
    error = {"message": "no", "param": None, "code": "backend_error"}
    assert translation("messages").answer(status, body) == {
        "type": "error",
        "error": {**error, "type": anthropic},
    }
    assert translation("responses").answer(status, body) == {"error": {**error, "type": openai}}


def test_errors_name_the_clients_field() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://a"}}
    asked = [{"role": "user", "content": "x"}, {"role": "user", "content": [image]}]
    path = "messages[2].content[0].image_url.url"
    body = {"error": {"message": f"{path}: not found", "type": "x", "param": path, "code": "bad_image"}}
    wrong = translation("messages", messages=asked, system="s").answer(400, body)["error"]
    assert wrong["param"] == "messages[1].content[0].source"
    assert wrong["message"] == "messages[1].content[0].source: not found"
    assert wrong["code"] == "bad_image"
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "https://a"}]}
    wrong = translation("responses", input=[item, item], instructions="s").answer(400, body)["error"]
    assert wrong["param"] == "input[1].content[0].image_url"


@pytest.mark.parametrize("body", [None, [], "no", {}, {"error": {}}, {"error": None}, {"detail": [1]}])
def test_errors_without_a_message(body: Any) -> None:
    for api in APIS:
        assert translation(api).answer(502, body)["error"]["message"]


def test_long_messages_are_cut() -> None:
    error = translation("messages").answer(400, {"error": {"message": "a" * 10_000, "param": "b" * 10_000}})
    assert len(str(error)) < 1000


def test_errors_of_the_gateway_itself() -> None:
    error = Overloaded("wait", retry_after=1.0, param="model")
    wrong = {"message": "wait", "type": "rate_limit_error", "param": "model", "code": "overloaded"}
    assert translation("messages").refusal(error) == {"type": "error", "error": wrong}
    assert translation("responses").refusal(error) == {"error": wrong}
