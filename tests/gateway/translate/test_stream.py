"""Streams of chat chunks as events of the other APIs: in any cut, of any engine, and broken ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.api import sse
from fovea.gateway.translate.translation import Api
from tests.gateway.translate.support import (
    APIS,
    RICH,
    USAGE,
    Json,
    call,
    check,
    chunk,
    events,
    line,
    stream,
    translated,
    translation,
)
from tests.support.thorough import examples

STOP = chunk({}, "stop")
TEXT = chunk({"content": "Hello"})


def summary(data: bytes) -> list[tuple[str, str]]:
    """The parts of a streamed message: type, and its text, or name and arguments of a call."""
    parts: list[list[str]] = []
    found = events(data)
    check("messages", found)
    for event in found:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            parts.append([block["type"], f"{block['name']}:" if "name" in block else ""])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            parts[-1][1] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
    return [(kind, text) for kind, text in parts]


def ends(data: bytes) -> Json:
    """The event that tells how a message has ended."""
    [event] = [event for event in events(data) if event["type"] == "message_delta"]
    return event


def test_all_kinds_of_pieces() -> None:
    data = translated("messages", [RICH])
    assert summary(data) == [
        ("thinking", "hm …"),
        ("text", "Ich schaue nach: 🌞"),
        ("tool_use", 'look:{"city": "Köln"}'),
        ("tool_use", "stop:{}"),
    ]
    assert ends(data)["delta"]["stop_reason"] == "tool_use"
    assert ends(data)["usage"] == {
        "input_tokens": 7, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 0, "output_tokens": 4,
    }  # fmt: skip
    ids = [event["content_block"].get("id") for event in events(data) if "content_block" in event]
    assert ids == [None, None, "a", "b"]


def test_all_kinds_of_items() -> None:
    found = events(translated("responses", [RICH]))
    check("responses", found)
    response = found[-1]["response"]
    assert [item["type"] for item in response["output"]] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in response["output"][2:]]
    assert calls == [("a", "look", '{"city": "Köln"}'), ("b", "stop", "{}")]
    assert response["usage"]["input_tokens_details"] == {
        "cached_tokens": 2, "cache_write_tokens": 0, "image_tokens": 3, "dropped_tokens": 0,
    }  # fmt: skip
    assert response["created_at"] == 5  # as the backend says


@pytest.mark.parametrize("api", APIS)
@settings(max_examples=examples(60), deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20), crlf=st.booleans())
def test_any_cut_gives_the_same_bytes(api: Api, sizes: list[int], crlf: bool) -> None:
    data = b": ping\n\n" + RICH
    if crlf:
        data = data.replace(b"\n", b"\r\n")
    parts, at = [], 0
    while at < len(data):
        size = sizes[len(parts) % len(sizes)]
        parts.append(data[at : at + size])
        at += size
    assert translated(api, parts) == translated(api, [b": ping\n\n" + RICH])


def test_every_single_byte_is_a_cut() -> None:
    parts = [RICH[at : at + 1] for at in range(len(RICH))]
    for api in APIS:
        assert translated(api, parts) == translated(api, [RICH])


def test_events_leave_as_soon_as_they_are_certain() -> None:
    translator = translation("messages").translator()
    assert [event["type"] for event in events(translator.feed(line(TEXT)))] == [
        "message_start", "content_block_start", "content_block_delta",
    ]  # fmt: skip
    assert events(translator.feed(line(STOP))) == []
    assert events(translator.feed(sse.DONE))[-1]["type"] == "message_stop"
    assert translator.ended
    assert not translator.failed
    assert translator.feed(line(TEXT)) == translator.close() == translator.close("broke") == b""


def bytes_of(*values: Any, end: bytes = b"\n\n", start: bytes = b"data: ") -> bytes:
    return b"".join(start + json.dumps(value).encode() + end for value in values)


ENGINES = {
    "no [DONE]": stream(TEXT, STOP, done=False),
    "no empty line at the end": stream(TEXT, STOP, done=False)[:-2],
    "CRLF": bytes_of(TEXT, STOP, end=b"\r\n\r\n"),
    "no space": bytes_of(TEXT, STOP, start=b"data:"),
    "comments": b": OPENROUTER PROCESSING\n\n" + line(TEXT) + b":\n\n" + stream(STOP),
    "event names and ids": b"event: chunk\nid: 1\nretry: 5\n" + stream(TEXT, STOP),
    "role alone": stream(
        chunk({"role": "assistant"}), TEXT, chunk({"role": "assistant", "content": ""}), STOP
    ),
    "null": stream(chunk({"role": "assistant", "content": None, "tool_calls": None}), TEXT, STOP),
    "no choices": stream({"choices": [], "prompt_filter_results": [], "model": "", "created": 0}, TEXT, STOP),
    "reason with text": stream(chunk({"content": "Hel"}), chunk({"content": "lo"}, "stop")),
    "usage with a choice": stream(TEXT, chunk({}, "stop", usage=USAGE)),
    "null usage": stream(TEXT | {"usage": None}, STOP | {"usage": None}),
    "no delta": stream(TEXT, {"choices": [{"index": 0, "finish_reason": "stop"}]}),
    "null delta": stream(TEXT, {"choices": [{"index": 0, "delta": None, "finish_reason": "stop"}]}),
    "parts": stream(chunk({"content": [{"type": "text", "text": "Hello"}]}), STOP),
    "token counts broke off": stream(TEXT, STOP, done=False) + b'data: {"choices": [], "usa',
    "second choice": stream(
        TEXT, {"choices": [{"index": 1, "delta": {"content": "no"}, "finish_reason": "stop"}]}, STOP
    ),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("api", APIS)
def test_forms_of_engines(api: Api, name: str) -> None:
    data = translated(api, [ENGINES[name]])
    check(api, events(data))
    if api == "messages":
        assert summary(data) == [("text", "Hello")]
    else:
        assert events(data)[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"


def test_comments_keep_the_connection_open() -> None:
    translator = translation("messages").translator()
    assert translator.feed(b": keep-alive\n\n") == sse.COMMENT
    assert sse.Decoder().feed(sse.COMMENT) == []


CALLS = {
    "whole": stream(chunk(call(0, '{"a": 1}', id="x", name="f")), STOP),
    "no index": stream(chunk(call(None, '{"a"', id="x", name="f")), chunk(call(None, ": 1}")), STOP),
    "id and name again": stream(
        chunk(call(0, '{"a"', id="x", name="f")), chunk(call(0, ": 1}", id="x", name="f")), STOP
    ),
    "empty id and null name": stream(
        chunk(call(0, '{"a"', id="x", name="f")), chunk(call(0, ": 1}", id="", name=None)), STOP
    ),
    "arguments as an object": stream(
        chunk({"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": {"a": 1}}}]}),
        STOP,
    ),
    "not a list": stream(
        chunk({"tool_calls": {"id": "x", "function": {"name": "f", "arguments": '{"a": 1}'}}}), STOP
    ),
    "arguments before the name": stream(
        chunk(call(0, '{"a"', id="x")), chunk(call(0, ": 1}", name="f")), STOP
    ),
    "empty text between": stream(
        chunk(call(0, '{"a"', id="x", name="f")), chunk({"content": ""}), chunk(call(0, ": 1}")), STOP
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_forms_of_calls(name: str) -> None:
    data = translated("messages", [CALLS[name]])
    assert summary(data) == [("tool_use", 'f:{"a": 1}')]
    assert ends(data)["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "places", [(0, 1), (None, None), (0, 0)], ids=["numbered", "no index", "one index for all"]
)
def test_several_calls(places: tuple[int | None, int | None]) -> None:
    chunks = [
        chunk(call(place, "{}", id=name, name=name)) for place, name in zip(places, ("f", "g"), strict=True)
    ]
    assert summary(translated("messages", [stream(*chunks, STOP)])) == [
        ("tool_use", "f:{}"), ("tool_use", "g:{}"),
    ]  # fmt: skip


def test_calls_of_one_id_get_their_own() -> None:
    data = translated(
        "responses",
        [stream(chunk(call(0, "{}", id="0", name="f")), chunk(call(1, "{}", id="0", name="g")), STOP)],
    )
    ids = [item["call_id"] for item in events(data)[-1]["response"]["output"]]
    assert ids[0] == "0"
    assert ids[1].startswith("call_")


@pytest.mark.parametrize(
    ("reason", "message", "status", "details"),
    [
        ("length", "max_tokens", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "refusal", "incomplete", {"reason": "content_filter"}),
        ("stop", "end_turn", "completed", None),
        ("eos_token", "end_turn", "completed", None),
    ],
)
def test_finish_reasons(reason: str, message: str, status: str, details: Json | None) -> None:
    data = stream(TEXT, chunk({}, reason))
    assert ends(translated("messages", [data]))["delta"]["stop_reason"] == message
    last = events(translated("responses", [data]))[-1]
    assert last["type"] == f"response.{status}"
    assert last["response"]["incomplete_details"] == details


@pytest.mark.parametrize("field", ["stop_reason", "matched_stop"])
def test_stop_sequence(field: str) -> None:
    """An engine may name its own end mark there, too, which is not a stop sequence of the request."""
    for value, told in (
        ("END", ("stop_sequence", "END")),
        ("</s>", ("end_turn", None)),
        (2, ("end_turn", None)),
    ):
        last = chunk({}, "stop")
        last["choices"][0][field] = value
        delta = ends(translated("messages", [stream(TEXT, last)]))["delta"]
        assert (delta["stop_reason"], delta["stop_sequence"]) == told


def test_empty_answer() -> None:
    for api in APIS:
        check(api, events(translated(api, [stream(STOP)])))


def test_halves_of_characters_are_replaced() -> None:
    data = stream(chunk({"content": "a\ud83d"}), chunk({"content": "b"}), STOP)
    assert summary(translated("messages", [data])) == [("text", "a\ufffdb")]


def test_halves_of_characters_elsewhere_are_replaced() -> None:
    entry = {"token": "\ud83d", "logprob": -1.0}
    choice = {"delta": {"content": "a"}, "logprobs": {"content": [entry]}, "finish_reason": "stop"}
    data = translated("responses", [stream({"choices": [choice], "fovea": {"a": "\ud83d"}})])
    response = events(data)[-1]["response"]
    assert response["output"][0]["content"][0]["logprobs"] == [{"token": "\ufffd", "logprob": -1.0}]
    assert response["fovea"] == {"a": "\ufffd"}


@pytest.mark.parametrize("depth", [50, 97, 98, 99, 100, 940])
def test_deep_values_end_the_stream_at_most_once(depth: int) -> None:
    deep = '{"choices": [], "fovea": {"a": %s}}' % ("[" * depth + "]" * depth)
    data = stream(TEXT, STOP, done=False) + f"data: {deep}\n\n".encode() + sse.DONE
    for api in APIS:
        found = events(translated(api, [data]))
        check(api, found, failed=found[-1]["type"] == "error")


BROKEN = {
    "nothing": b"",
    "no finish reason": stream(TEXT, done=False),
    "[DONE] without a finish reason": stream(TEXT),
    "cut within an event": stream(TEXT, STOP, done=False)[:-20],
    "not JSON": stream(TEXT, done=False) + b"data: {nothing\n\n",
    "no object": line([1]),
    "too deep": b"data: " + b"[" * 100_000 + b"\n\n",
    "choice": line({"choices": ["a"]}),
    "delta": line({"choices": [{"index": 0, "delta": "a"}]}),
    "content": line(chunk({"content": 5})),
    "part": line(chunk({"content": [{"type": "audio"}]})),
    "call": line(chunk({"tool_calls": ["a"]})),
    "call without a name": stream(chunk(call(0, "{}", id="x")), STOP),
    "calls that alternate": stream(
        chunk(call(0, id="a", name="f")), chunk(call(1, id="b", name="g")), chunk(call(0, "{}")), STOP
    ),
    "failed": stream(TEXT, chunk({}, "error")),
    "aborted": stream(TEXT, chunk({}, "abort")),
    "error event": stream(TEXT, {"error": {"message": "no memory", "type": "x", "code": 500}}),
    "error as text": line({"error": "no memory", "error_type": "generation"}),
    "error without an envelope": line({"object": "error", "message": "no memory", "code": 503}),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("api", APIS)
def test_broken_streams_end_with_an_error(api: Api, name: str) -> None:
    found = events(translated(api, [BROKEN[name]]))
    check(api, found, failed=True)


@pytest.mark.parametrize("api", APIS)
def test_connection_that_broke(api: Api) -> None:
    found = events(translated(api, [stream(TEXT, done=False)], "the backend's connection was reset"))
    check(api, found, failed=True)
    error = found[-1].get("error", found[-1])
    assert (error["message"], error["code"]) == (
        "the backend's connection was reset", "backend_stream_broken",
    )  # fmt: skip


def test_error_of_a_backend_in_both_forms() -> None:
    data = line({"error": {"message": "slow down", "type": "X", "code": 429, "param": None}})
    assert events(translated("messages", [data])) == [
        {
            "type": "error",
            "error": {
                "type": "rate_limit_error", "message": "slow down", "param": None, "code": "backend_error",
            },
        }
    ]  # fmt: skip
    assert events(translated("responses", [data])) == [
        {
            "type": "error",
            "message": "slow down",
            "code": "backend_error",
            "param": None,
            "sequence_number": 0,
        }
    ]


WORDS = (
    b"", b"{", b'"', b"null", b"\xff", b"\n", b"\n\n", b"[[", b"\\ud800", b"5", b"1e999", b"NaN", b"data:",
)  # fmt: skip


@pytest.mark.parametrize("api", APIS)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_corrupted_streams_never_raise(api: Api, data: st.DataObject) -> None:
    """Bytes are replaced, inserted and cut off anywhere. Whatever comes of it ends exactly once."""
    spoilt = bytearray(RICH)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(spoilt)))
        until = data.draw(st.integers(at, min(len(spoilt), at + 30)))
        words = st.sampled_from(
            [b"", b"{", b'"', b"null", b"\xff", b"\n", b"\n\n", b"[[", b"\\ud800", b"5", b"1e999"]
        )
        spoilt[at:until] = data.draw(words)
    del spoilt[data.draw(st.integers(1, len(spoilt))) :]
    found = events(translated(api, [bytes(spoilt)]))
    check(api, found, failed=found[-1]["type"] == "error")


@pytest.mark.parametrize("api", APIS)
def test_truncated_streams_are_never_complete(api: Api) -> None:
    whole = RICH.index(b'"tool_calls"}]') + len(b'"tool_calls"}]}')  # the end of the finish reason
    for at in range(0, len(RICH), 7):
        found = events(translated(api, [RICH[:at]]))
        check(api, found, failed=at < whole)


def test_event_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.gateway.translate.translation.LONGEST_EVENT", 1000)
    translator = translation("messages").translator()
    assert translator.feed(b"data: " + b"a" * 900) == b""
    assert "too long" in events(translator.feed(b"a" * 900))[0]["error"]["message"]
    assert translator.failed
    check("messages", events(translated("messages", [line(chunk({"content": "a" * 2000}))])), failed=True)
