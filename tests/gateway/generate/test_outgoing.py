"""Requests for backends: only what has to change changes, and the client's body stays as it is."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.errors import InvalidRequest
from fovea.core.names import KEY_HEADER
from fovea.gateway.backends.backend import Backend
from fovea.gateway.config import ModelConfig
from fovea.gateway.generate.outgoing import (
    LONGEST_HEADER,
    MOST_BYTES,
    MOST_HEADERS,
    PASSED_ON,
    PATHS,
    Renderer,
    check_headers,
    client_header,
    headers_of,
    key_header,
    lowered,
)
from fovea.gateway.generate.upstream import Outgoing
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.translate.translation import to_chat
from tests.gateway.samples import MODEL, backend, body, chat

PLAIN, PIXELS, OFF = (backend(name, degrade=name) for name in ("detail", "max-pixels", "off"))
LONG = "data:image/png;base64," + "A" * 1000


def value_of(outgoing: Outgoing) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(b"".join(outgoing.pieces))
    return value


def rendered(
    value: dict[str, Any], to: Backend = PLAIN, *, degraded: str = "", api: str = "chat"
) -> dict[str, Any]:
    """The value that a backend gets. Checks that the client's body is not changed."""
    given_body = body(value)
    before = copy.deepcopy(given_body.value)
    renderer = Renderer(given_body, api, {}, "id")
    renderer.degraded = degraded
    out = value_of(renderer(to, MODEL))
    assert given_body.value == before
    return out


def image(**fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": LONG, **fields}}


def with_parts(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
IMAGES = st.builds(
    lambda fields, more: {"type": "image_url", "image_url": {"url": LONG, **fields}, **more},
    st.fixed_dictionaries(
        {},
        optional={
            "detail": st.sampled_from([None, "auto", "low", "high", 5, ["auto"]]),
            "min_pixels": st.sampled_from([None, 0, 5]),
            "max_pixels": st.sampled_from([None, 0, 5]),
            "x": JSON,
        },
    ),
    st.dictionaries(st.sampled_from(["cache_control", "uuid"]), JSON, max_size=1),
)
PARTS = st.one_of(
    IMAGES,
    st.just({"type": "video_url", "video_url": {"url": "https://h/v"}}),
    st.just({"type": "image_url", "image_url": LONG}),
    st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=9)),
)
BODIES = st.builds(
    lambda parts, more: {"model": "m", "messages": [{"role": "user", "content": parts}], **more},
    st.lists(PARTS, max_size=5),
    st.dictionaries(
        st.sampled_from(["tools", "metadata", "seed", "visual_tokens", "temperature"]), JSON, max_size=3
    ),
)


@given(BODIES, st.sampled_from(["low", "medium"]))
def test_only_images_without_their_own_detail_are_lowered(value: dict[str, Any], detail: str) -> None:
    before = copy.deepcopy(value)
    expected = copy.deepcopy(value)
    for part in expected["messages"][0]["content"]:
        held = part.get("image_url")
        if isinstance(held, dict) and "visual_tokens" not in value:
            bounds = held.get("min_pixels") or held.get("max_pixels")
            if not bounds and held.get("detail") in (None, "auto"):
                held["detail"] = detail
    assert lowered(value, detail) == expected
    assert value == before


@given(BODIES, st.sampled_from(["", "low", "medium"]))
def test_backends_get_their_own_requests(value: dict[str, Any], detail: str) -> None:
    given_body = body(value)
    renderer = Renderer(given_body, "chat", {}, "id")
    renderer.degraded = detail
    first = [value_of(renderer(to, MODEL)) for to in (PLAIN, PIXELS, OFF)]
    again = [rendered(value, to, degraded=detail) for to in (PLAIN, PIXELS, OFF)]
    assert first == again
    assert first[2] == {**value, "model": "m"}
    assert first[0] == (lowered(value, detail) if detail else value)
    kwargs = first[1].pop("mm_processor_kwargs", None)
    assert first[1] == value
    assert (kwargs is not None) == bool(detail)


@pytest.mark.parametrize("degrade", ["max-pixels", "detail", "off"])
def test_nothing_is_lowered_without_need(degrade: str) -> None:
    value = with_parts(image(), mm_processor_kwargs={"fps": 1})
    assert rendered(value, backend("x", degrade=degrade)) == value


def test_pixels_for_backends_without_detail_levels() -> None:
    assert rendered(with_parts(image()), PIXELS, degraded="medium")["mm_processor_kwargs"] == {
        "max_pixels": 262144
    }
    assert rendered(with_parts(image()), PIXELS, degraded="low")["mm_processor_kwargs"] == {
        "max_pixels": 65536
    }
    own = with_parts(image(), mm_processor_kwargs={"max_pixels": 9, "fps": 2})
    assert rendered(own, PIXELS, degraded="low") == own


def test_an_input_image_is_lowered_where_its_detail_is() -> None:
    part = {"type": "input_image", "image_url": LONG}
    value = {"model": "m", "input": [{"role": "user", "content": [part, {**part, "detail": "high"}]}]}
    parts = rendered(value, degraded="low", api="responses")["input"][0]["content"]
    assert parts == [{**part, "detail": "low"}, {**part, "detail": "high"}]


@pytest.mark.parametrize(
    "source",
    [
        {"type": "url", "url": "https://h/a.png"},
        {"type": "base64", "media_type": "image/png", "data": "A" * 500},
    ],
)
def test_sources_of_anthropic_have_no_detail(source: dict[str, Any]) -> None:
    value = with_parts({"type": "image", "source": source}, max_tokens=9)
    assert rendered(value, degraded="low", api="messages") == value


def test_translated_images_are_lowered() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 500}
    given_body = body(with_parts({"type": "image", "source": source}, max_tokens=9))
    translated = given_body.with_value(to_chat("messages", given_body.value, given_body.text).body)
    renderer = Renderer(translated, "chat", {}, "id")
    renderer.degraded = "low"
    [part] = value_of(renderer(PLAIN, MODEL))["messages"][0]["content"]
    assert part["image_url"] == {"url": "data:image/png;base64," + "A" * 500, "detail": "low"}


def test_the_name_of_the_model_at_the_backend() -> None:
    renderer = Renderer(body(chat("u", text="x", model="alias")), "chat", {}, "id")
    names = [
        value_of(renderer(PLAIN, model))["model"]
        for model in (ModelConfig("m"), ModelConfig("m", served="org/m"), ModelConfig("n"), ModelConfig("m"))
    ]
    assert names == ["m", "org/m", "n", "m"]
    assert renderer(PLAIN, MODEL) is renderer(OFF, MODEL)  # written once
    assert value_of(Renderer(body({"messages": []}), "chat", {}, "id")(PLAIN, MODEL))["model"] == "m"


@pytest.mark.parametrize(
    ("api", "fields", "adds", "options"),
    [
        ("chat", {"stream": True}, True, {"include_usage": True}),
        ("completions", {"stream": True}, True, {"include_usage": True}),
        ("chat", {"stream": True, "stream_options": None}, True, {"include_usage": True}),
        (
            "chat",
            {"stream": True, "stream_options": {"include_usage": False, "x": 1}},
            True,
            {"include_usage": True, "x": 1},
        ),
        (
            "chat",
            {"stream": True, "stream_options": {"include_usage": True, "x": 1}},
            False,
            {"include_usage": True, "x": 1},
        ),
        ("chat", {}, False, None),
        ("chat", {"stream": False}, False, None),
        ("messages", {"stream": True}, False, None),
        ("responses", {"stream": True}, False, None),
    ],
)
def test_usage_is_asked_for(api: str, fields: dict[str, Any], adds: bool, options: Any) -> None:
    renderer = Renderer(body({"model": "m", **fields}), api, {}, "id")
    assert renderer.adds_usage is adds
    outgoing = renderer(PLAIN, MODEL)
    assert value_of(outgoing).get("stream_options") == options
    assert outgoing.path == PATHS[api]


def test_headers_that_are_passed_on() -> None:
    given_headers = {
        b"authorization": b"Bearer secret", b"x-api-key": b"secret", b"cookie": b"secret",
        b"traceparent": b"00-1", b"tracestate": b"a=\xe9", b"x-session-id": b"s", b"anthropic-version": b"v",
        b"anthropic-beta": b"b", b"host": b"gateway", b"content-length": b"5", b"x-forwarded-for": b"1.2.3.4",
    }  # fmt: skip
    outgoing = Renderer(body({}), "chat", given_headers, "req_1")(PLAIN, MODEL)
    assert dict(outgoing.headers) == {
        "content-type": "application/json", "x-request-id": "req_1", "traceparent": "00-1",
        "tracestate": "a=é", "x-session-id": "s", "anthropic-version": "v", "anthropic-beta": "b",
    }  # fmt: skip
    assert "secret" not in str(outgoing)


def test_the_key_of_a_request_is_told_to_what_is_behind_a_backend() -> None:
    """A backend may be the ingress of several engines, which sends an image to the one that knows it."""
    demand = Demand(body({"messages": [{"role": "user", "content": "hello"}]}), [], "session")
    (key,) = key_header(demand, {}).values()
    assert key == key_header(demand, {b"x-other": b"1"})[KEY_HEADER]
    assert "session" not in key
    assert key_header(demand, {KEY_HEADER.encode(): b"own"}) == {}
    outgoing = Renderer(body({}), "chat", {KEY_HEADER.encode(): b"own"}, "id")(PLAIN, MODEL)
    assert dict(outgoing.headers)[KEY_HEADER] == "own"


def test_headers_that_backends_get_are_bounded() -> None:
    """Headers were once passed on at any length, and engines refuse requests with more than a few KiB."""
    check_headers(dict.fromkeys(PASSED_ON, b"x" * LONGEST_HEADER) | {b"x-other": b"x" * 99_999})
    for name in PASSED_ON:
        with pytest.raises(InvalidRequest, match="has 1025 bytes; accepted: at most 1024") as caught:
            check_headers({name: b"x" * (LONGEST_HEADER + 1)})
        assert caught.value.param == name.decode()


def test_headers_of_a_backends_answer_are_bounded() -> None:
    """A backend could once add any number of headers to answers; proxies give up on large heads."""
    sent = [
        ("x-fovea-images", "a" * 4000),
        *((f"x-fovea-{n}", "b" * 100) for n in range(1000)),
        ("x-own", "c"),
    ]
    won: Any = SimpleNamespace(
        answer=SimpleNamespace(headers=sent), backend=PLAIN, model=MODEL, reason="only"
    )
    headers = headers_of(won, MODEL, 1, "", "")
    assert headers["x-fovea-images"] == "a" * 4000
    assert len(headers) <= MOST_HEADERS + 3
    assert sum(map(len, [*headers, *headers.values()])) < MOST_BYTES + 200
    assert "x-own" not in headers


def test_engines_tell_tenants_apart_without_their_names() -> None:
    one, other = client_header("alice"), client_header("bob")
    assert one.keys() == other.keys() == {"x-fovea-client"}
    assert one != other
    assert "alice" not in one["x-fovea-client"]
    assert client_header("") == {}
