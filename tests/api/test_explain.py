"""Explanation of pydantic's errors in terms of the fields that the client sent."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fovea.api.explain import LONGEST, explain, path_of, shorten
from fovea.api.schema import ChatRequest, CompletionRequest
from fovea.api.wire import Wire
from fovea.core.errors import InvalidRequest


def explanation(body: Any, model: type[Wire] = ChatRequest) -> InvalidRequest:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return explain(caught.value.errors())


def content(value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": value}]}


@pytest.mark.parametrize(
    ("location", "path"),
    [
        (("body",), ""),
        ((), ""),
        (("body", "temperature"), "temperature"),
        (("body", "messages", 0, "role"), "messages[0].role"),
        (
            ("body", "messages", 0, "content", "list[tagged-union[A,B]]", 1, "text", "text"),
            "messages[0].content[1].text",
        ),
        (("messages", 0, "content", "list[X]", 1, "image_url"), "messages[0].content[1]"),
        (
            ("body", "messages", 2, "content", "list[X]", 1, "image_url", "image_url", "url"),
            "messages[2].content[1].image_url.url",
        ),
        (("body", "prompt", "list[list[int]]", 0, 1), "prompt[0][1]"),
        (("body", "stop", "constrained-str"), "stop"),
        (("body", "body"), "body"),
        (("body", "x" * 100), "x" * LONGEST + "..."),
    ],
)
def test_paths(location: tuple[Any, ...], path: str) -> None:
    assert path_of(location) == path


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (
            {"messages": [{"role": "assistant", "refusal": 5}]},
            "messages[0].refusal",
            "messages[0].refusal: must be a valid string, got 5",
        ),
        (
            content([{"type": "refusal", "refusal": 5}]),
            "messages[0].content[0].refusal",
            "messages[0].content[0].refusal: must be a valid string, got 5",
        ),
        (
            content(5),
            "messages[0].content",
            "messages[0].content: must be a valid string or a valid list, got 5",
        ),
        (
            content([{"type": "text", "text": 5}]),
            "messages[0].content[0].text",
            "messages[0].content[0].text: must be a valid string, got 5",
        ),
        (
            content([{"type": "image_url", "image_url": 5}]),
            "messages[0].content[0].image_url",
            "messages[0].content[0].image_url: must be an object, got 5",
        ),
        (
            content([{"text": "x"}]),
            "messages[0].content[0].type",
            "messages[0].content[0].type is required",
        ),
        (
            {"messages": [{"role": "wizard", "content": "x"}]},
            "messages[0].role",
            "messages[0].role: must be 'system', 'developer', 'user', 'assistant' or 'tool', got 'wizard'",
        ),
        (
            content("\ud800"),
            "messages[0].content",
            "messages[0].content: the text holds half of a surrogate pair, which is not valid Unicode, "
            "got '\\ud800'",
        ),
        ({**content("x"), "temperature": True}, "temperature", "temperature: must be a number, got True"),
        ({}, "messages", "messages is required"),
    ],
)
def test_messages(body: Any, param: str, message: str) -> None:
    error = explanation(body)
    assert (error.param, error.message) == (param, message)


def test_message_for_a_prompt_of_a_wrong_type() -> None:
    error = explanation({"prompt": {"a": 1}}, CompletionRequest)
    assert error.message == "prompt: must be a valid string or a valid list, got {'a': 1}"


def test_explain_without_problems() -> None:
    assert explain([]).message == "the body is not valid"


def test_shorten_limits_length_and_depth() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 10**6, 10**4000, list(range(10**5)), deep, {"a": {"b": {"c": {"d": {}}}}}):
        assert len(shorten(value)) < 200
