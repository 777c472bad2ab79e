"""Demands: later turns begin alike, other prompts do not, and tokens are estimated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.errors import InvalidRequest
from fovea.gateway.inspect.demand import PREFIX_BYTES, USUAL_ANSWER, Demand
from fovea.gateway.inspect.fields import media_parts
from fovea.gateway.inspect.images import RequestImage
from fovea.gateway.translate.translation import to_chat
from tests.gateway.samples import body, demand, image

SYSTEM = {"role": "system", "content": "You read invoices."}
URL = "data:image/png;base64," + "A" * 40_000
BASE64 = {"type": "base64", "media_type": "image/png", "data": "A" * 40_000}
LONG = {"type": "url", "url": "https://h/" + "A" * 9000}


def prefix(*messages: dict[str, Any], **fields: Any) -> str:
    return Demand(body({"messages": list(messages), **fields}), []).prefix


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


@given(st.lists(st.text(max_size=400), min_size=1, max_size=4), st.text(max_size=400))
def test_later_turns_begin_alike(texts: list[str], system: str) -> None:
    messages = [{"role": "system", "content": system}, user(texts[0])]
    first = prefix(*messages)
    for text in texts[1:]:
        messages += [{"role": "assistant", "content": "Yes."}, user(text)]
        assert prefix(*messages) == first


def test_forms_of_one_beginning_are_equal() -> None:
    first = prefix(SYSTEM, user("Hello"))
    assert prefix(SYSTEM, user([{"type": "text", "text": "Hello"}])) == first
    parts = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "Hello"}]
    assert prefix(SYSTEM, user(parts)) == first
    assert prefix(SYSTEM, user("Hello"), model="x", temperature=1) == first


def test_other_beginnings_differ() -> None:
    beginnings = [
        prefix(SYSTEM, user("Hello")),
        prefix({"role": "system", "content": "You read maps."}, user("Hello")),
        prefix(user("Hello")),
        prefix(SYSTEM, user("Hello.")),
        prefix(SYSTEM, user([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}])),
        prefix({"role": "system", "content": "You read invoices.H"}, user("ello")),
        prefix(user("Hello"), system="You read faces."),
        prefix(user("Hello"), system="x" * 1000),
        prefix(user("Hello"), system="x" * 999 + "y"),
        Demand(body({"input": "Hello!", "instructions": "x"}), []).prefix,
        Demand(body({"prompt": "Hello?"}), []).prefix,
    ]
    assert len(set(beginnings)) == len(beginnings)


def test_only_the_beginning_of_a_long_text_counts() -> None:
    same = "x" * PREFIX_BYTES
    assert prefix(user(same + "a")) == prefix(user(same + "b"))
    assert prefix(user(same[1:] + "a")) != prefix(user(same[1:] + "b"))
    assert prefix(SYSTEM, user(same + "a")) == prefix(SYSTEM, user(same + "b"))


def test_other_apis_have_the_same_beginnings() -> None:
    text = Demand(body({"input": "Hello"}), []).prefix
    listed = Demand(body({"input": [user([{"type": "input_text", "text": "Hello"}])]}), [])
    assert listed.prefix == text == prefix(user("Hello"))
    assert len(text) == 16
    int(text, 16)


@pytest.mark.parametrize("value", [{}, {"messages": []}, {"messages": [None, "x", {"content": 5}]}])
def test_requests_without_texts_have_a_prefix_too(value: dict[str, Any]) -> None:
    made = Demand(body(value), [])
    assert list(made.keys()) == [("prefix", made.prefix)]


def test_the_strongest_key_is_the_first() -> None:
    both = demand("Hello", "id0", "id1", prompt_cache_key="talk")
    assert list(both.keys()) == [("image", "id0"), ("session", "talk"), ("prefix", both.prefix)]
    assert list(demand("Hello", session="talk").keys())[0] == ("session", "talk")
    unknown = RequestImage("", b"\x01", 0, 0, False, image("x").part)
    assert unknown.key == "url:01"


def test_a_session_of_the_body_precedes_the_header() -> None:
    assert demand(session="header").session == "header"
    assert demand(session="header", session_id="body").session == "body"
    assert demand(session="header", conversation="", session_id=5).session == "header"
    names = {demand(prompt_cache_key="k" * 500).session for _ in range(2)}
    assert len(names) == 1
    assert names != {demand(prompt_cache_key="k" * 499).session}


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, USUAL_ANSWER),
        ({"max_tokens": 10}, 10),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 10, "max_completion_tokens": 7}, 10),
        ({"max_output_tokens": 5, "n": 3}, 15),
        ({"max_tokens": 10, "n": 0}, 10),
        ({"max_tokens": None, "n": None}, USUAL_ANSWER),
        ({"max_tokens": -1}, USUAL_ANSWER),
        ({"max_tokens": 10, "n": 2, "best_of": 5}, 50),
    ],
)
def test_tokens_of_the_answer(fields: dict[str, Any], tokens: int) -> None:
    assert demand(**fields).answer_tokens == tokens


def test_answers_that_are_too_long_together() -> None:
    with pytest.raises(InvalidRequest, match="accepted: at most") as caught:
        demand(max_tokens=1 << 30, n=64)
    assert caught.value.param == "max_tokens"


def test_tokens_of_the_prompt_are_a_quarter_of_its_bytes() -> None:
    empty, long = demand("").prompt_tokens, demand("x" * 4000).prompt_tokens
    assert long - empty == 1000
    assert demand("").text_tokens == empty + USUAL_ANSWER
    assert demand("x" * 4001).prompt_tokens - empty in (1000, 1001)
    with_tools = demand("", tools=[{"function": {"description": "d" * 400}}])
    names = len("function") + len("description")
    assert with_tools.prompt_tokens - empty in (100 + names // 4, 100 + names // 4 + 1)
    assert demand("", user="u" * 4000).prompt_tokens == empty


@pytest.mark.parametrize(
    ("api", "value"),
    [
        ("chat", {"messages": [user([{"type": "image_url", "image_url": {"url": URL}}])]}),
        ("chat", {"messages": [user([{"type": "image_url", "image_url": URL}])]}),
        ("responses", {"model": "m", "input": [user([{"type": "input_image", "image_url": URL}])]}),
        (
            "messages",
            {
                "model": "m",
                "max_tokens": 9,
                "messages": [user([{"type": "image", "source": BASE64}])],
            },
        ),
        (
            "messages",
            {
                "model": "m",
                "max_tokens": 9,
                "messages": [user([{"type": "image", "source": LONG}])],
            },
        ),
    ],
)  # fmt: skip
def test_images_are_no_text_also_after_a_translation(api: str, value: dict[str, Any]) -> None:
    given = body(value)
    images = [image("id", part) for part in media_parts(given.value)]
    assert len(images) == 1
    assert Demand(given, images).prompt_tokens < 20
    if api != "chat":
        translated = given.with_value(to_chat(api, given.value, given.text).body)  # type: ignore[arg-type]
        assert Demand(translated, images).prompt_tokens < 20


def test_the_model_is_a_text() -> None:
    with pytest.raises(InvalidRequest, match="model is not a text") as caught:
        demand(model=5)
    assert caught.value.param == "model"


@pytest.mark.parametrize(("stream", "expected"), [(True, True), (False, False), ("yes", False), (1, False)])
def test_streams(stream: Any, expected: bool) -> None:
    assert demand(stream=stream).stream is expected


def test_visual_tokens_wait_for_the_model() -> None:
    assert demand("x", "id").visual_tokens == 0
    assert demand("x", "id").has_images
    assert not demand("x").has_images
