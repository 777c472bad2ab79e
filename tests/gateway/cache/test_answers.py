"""Stored answers: both forms from either form, and everything that is not stored."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from fovea.api import sse
from fovea.gateway.cache.answers import PIECE, PIECE_ENTRIES, Unstorable, events, unpack
from fovea.gateway.cache.cache import SLICE, entry_of
from tests.gateway.cache.answers import BODIES, answer, recorded, sent


def payloads(stream: bytes) -> list[Any]:
    """The JSON of all events of a whole stream."""
    *found, done = sse.Decoder().feed(stream)
    assert done == "[DONE]"
    return [json.loads(payload) for payload in found]


@given(BODIES, st.integers(1, 7))
def test_a_recorded_replay_is_the_answer(body: dict[str, Any], pieces: int) -> None:
    stream = b"".join(events(body, include_usage=True))
    entry = recorded(stream, choices=len(body["choices"]), pieces=pieces)
    assert json.loads(entry.body) == body
    assert entry.has_usage == ("usage" in body)


@given(BODIES)
def test_the_openai_types_accept_both_forms(body: dict[str, Any]) -> None:
    chat = body["object"] == "chat.completion"
    (ChatCompletion if chat else Completion).model_validate(body)
    for chunk in payloads(b"".join(events(body, include_usage=True))):
        for choice in [] if chat else chunk["choices"]:
            # The type of text completions is that of complete ones, whose choices have all ended.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        (ChatCompletionChunk if chat else Completion).model_validate(chunk)


@given(BODIES)
def test_token_counts_come_only_if_the_client_asked(body: dict[str, Any]) -> None:
    without = payloads(b"".join(events(body, include_usage=False)))
    with_usage = payloads(b"".join(events(body, include_usage=True)))
    assert not any("usage" in chunk for chunk in without)
    assert with_usage[: len(without)] == without
    last = [{**chunk, "choices": [], "usage": body["usage"]} for chunk in with_usage[-1:] if "usage" in body]
    assert with_usage[len(without) :] == last


@given(BODIES)
def test_chunks_are_short_and_each_choice_ends_once(body: dict[str, Any]) -> None:
    ends = [0] * len(body["choices"])
    for chunk in payloads(b"".join(events(body, include_usage=True))):
        for piece in chunk["choices"]:
            ends[piece["index"]] += piece["finish_reason"] is not None
            assert len(piece.get("text") or piece.get("delta", {}).get("content") or "") <= PIECE
            assert len((piece.get("logprobs") or {}).get("content") or ()) <= PIECE_ENTRIES
    assert ends == [1] * len(ends)


def test_a_complete_answer_is_stored_byte_by_byte() -> None:
    data = json.dumps(answer(), indent=3).encode()
    entry = recorded(data, stream=False)
    assert entry.body == data
    assert entry.has_usage
    assert unpack(entry.pack()) == entry


@pytest.mark.parametrize("data", [b"", b"fvr1", b"x" * 100, b"fvr0" + b"\0" * 50])
def test_bytes_of_another_format_are_no_entry(data: bytes) -> None:
    assert unpack(data) is None


def chunk(delta: dict[str, Any], reason: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason, **fields}
    return {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def call(**fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, **fields}]}


END = chunk({}, "stop")


def test_a_stream_as_engines_send_it() -> None:
    stream = b": wait\r\n\r\n" + sent(
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "Hm"}),
        chunk({"reasoning_content": "m."}),
        chunk({"content": "A "}, logprobs={"content": [{"token": "A "}]}),
        chunk({"content": "cat."}, logprobs={"content": [{"token": "cat."}]}),
        chunk(call(id="c", type="function", function={"name": "f", "arguments": ""})),
        chunk(call(function={"arguments": '{"x"'})),
        chunk(call(id=None, function={"name": None, "arguments": ":1}"})),
        chunk({}, "tool_calls", stop_reason=None),
        {**END, "choices": [], "usage": {"total_tokens": 3}},
        "[DONE]",
    ).replace(b"\n", b"\r\n")
    for pieces in (1, 9, len(stream)):
        body = json.loads(recorded(stream, pieces=pieces).body)
        [choice] = body["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": "A cat.",
            "reasoning_content": "Hmm.",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
            ],
        }
        assert choice["logprobs"] == {"content": [{"token": "A "}, {"token": "cat."}]}
        assert choice["finish_reason"] == "tool_calls"
        assert body["usage"] == {"total_tokens": 3}
        assert body["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"", "cut"),
        (sent(chunk({"content": "A"}), END), "cut"),
        (sent(chunk({"content": "A"}), END, "[DONE]")[:-1], "cut"),
        (sent(END, "[DONE]", END), "cut"),
        (sent("[DONE]"), "missing_choice"),
        (sent(chunk({"content": "A"}), "[DONE]"), "not_finished"),
        (sent(chunk({}, "abort"), "[DONE]"), "not_finished"),
        (sent(chunk({}, "content_filter"), "[DONE]"), "not_finished"),
        (sent(chunk({}, ["stop"]), "[DONE]"), "not_finished"),
        (sent(END, {"error": {"message": "no"}}, "[DONE]"), "error"),
        (sent({"object": "error"}, "[DONE]"), "error"),
        (sent([1], "[DONE]"), "error"),
        (sent("{", "[DONE]"), "unreadable"),
        (sent(chunk({"content": "A"}), END, "[DONE]").replace(b'"A"', b'"\xff"'), "unreadable"),
        (sent(chunk({"content": "\ud800"}), END, "[DONE]"), "unreadable"),
        (sent({"id": "1"}, "[DONE]"), "not_an_answer"),
        (sent({"choices": [{"delta": {}}]}, "[DONE]"), "not_an_answer"),
        (sent({"choices": [{"index": 0, "finish_reason": "stop"}]}, "[DONE]"), "not_an_answer"),
        (sent(END, {**END, "id": "2"}, "[DONE]"), "ambiguous"),
        (sent(END, chunk({}, "length"), "[DONE]"), "ambiguous"),
        (sent(chunk({"content": [{"text": "A"}]}), END, "[DONE]"), "ambiguous"),
        (sent(chunk({"new": "A"}), chunk({"new": "B"}), END, "[DONE]"), "ambiguous"),
        (sent(chunk(call(id="a")), chunk(call(id="b")), END, "[DONE]"), "ambiguous"),
        (sent(chunk({"tool_calls": [{"id": "a"}]}), END, "[DONE]"), "ambiguous"),
        (sent(chunk({"tool_calls": [{"index": 1, "id": "a"}]}), END, "[DONE]"), "ambiguous"),
        (sent(chunk({"tool_calls": 1}), END, "[DONE]"), "ambiguous"),
        (sent(chunk({}, "stop", logprobs=[1]), "[DONE]"), "ambiguous"),
        (sent({**END, "choices": [{**END["choices"][0], "index": 1}]}, "[DONE]"), "missing_choice"),
    ],
)
def test_a_stream_that_is_not_stored(stream: bytes, reason: str) -> None:
    with pytest.raises(Unstorable, match=reason):
        recorded(stream)


@pytest.mark.parametrize("cut", range(1, 12))
def test_no_cut_of_a_stream_is_stored(cut: int) -> None:
    stream = b"".join(events(answer(), include_usage=True))
    with pytest.raises(Unstorable):
        recorded(stream[: len(stream) * cut // 12])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": {"message": "no"}}, "error"),
        ([answer()], "not_an_answer"),
        ({**answer(), "choices": None}, "not_an_answer"),
        ({**answer(), "choices": []}, "missing_choice"),
        ({**answer(), "choices": [{"index": 0, "finish_reason": "stop"}]}, "not_an_answer"),
        ({**answer(), "choices": [{"index": 0, "finish_reason": None, "message": {}}]}, "not_finished"),
        (answer("\ud800"), "unreadable"),
    ],
)
def test_a_complete_answer_that_is_not_stored(body: Any, reason: str) -> None:
    with pytest.raises(Unstorable, match=reason):
        recorded(json.dumps(body).encode(), stream=False)


def test_an_answer_with_too_few_choices_or_too_many_bytes_is_not_stored() -> None:
    data = json.dumps(answer()).encode()
    with pytest.raises(Unstorable, match="missing_choice"):
        recorded(data, stream=False, choices=2)
    with pytest.raises(Unstorable, match="too_large"):
        recorded(data, stream=False, limit=len(data) - 1)
    with pytest.raises(Unstorable, match="unreadable"):
        recorded(data[:-1], stream=False)


@pytest.mark.parametrize("pieces", [1, 3000])
async def test_other_tasks_run_while_a_long_stream_is_parsed(pieces: int) -> None:
    data = sent(*[chunk({"content": "A"})] * 3000, END, "[DONE]")
    turns, step = 0, -(-len(data) // pieces)
    parts = [data[start : start + step] for start in range(0, len(data), step)]
    task = asyncio.create_task(entry_of(parts, stream=True, choices=1, stored=1.0, limit=1 << 20))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert json.loads((await task).body)["choices"][0]["message"]["content"] == "A" * 3000
    assert turns >= 3000 // SLICE
