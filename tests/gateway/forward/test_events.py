"""Streams keep every byte, and their usage, errors and ends are seen wherever they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.gateway.generate.ends import LONGEST_EVENT, EventStream, error_event


def chunk(text: str = "a", **fields: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": text}}], **fields}


def sent(*values: Any, end: str = "\n\n", spaces: bool = False) -> bytes:
    separators = (", ", ": ") if spaces else (",", ":")
    texts = [
        value if isinstance(value, str) else json.dumps(value, separators=separators) for value in values
    ]
    return "".join(f"data: {text}{end}" for text in texts).encode()


def fed(data: bytes, cuts: list[int], api: str = "chat", *, strip: bool = False) -> tuple[bytes, EventStream]:
    """Feed a stream in pieces, and return what was passed on."""
    stream, out, at = EventStream(api, strip_usage=strip), [], 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        if cut > at:
            out.append(stream.feed(data[at:cut]))
            at = cut
    out.append(stream.finish())
    return b"".join(out), stream


USAGE = {"prompt_tokens": 10, "completion_tokens": 3}
LAST = {"id": "c", "choices": [], "usage": USAGE}
WHOLE = (chunk("a"), chunk("data: [DONE]"), chunk("\n\n"), chunk('"error"', usage=None), LAST, "[DONE]")
CUTS = st.lists(st.integers(0, 2000), max_size=12)


@given(CUTS, st.sampled_from(["\n\n", "\r\n\r\n"]), st.booleans())
def test_any_pieces_give_the_same_bytes(cuts: list[int], end: str, spaces: bool) -> None:
    data = b": comment" + end.encode() + sent(*WHOLE, end=end, spaces=spaces) + b":" + end.encode()
    out, stream = fed(data, cuts)
    assert out == data
    assert stream.complete
    assert not stream.failed
    assert stream.count == len(WHOLE)
    assert stream.usage() == USAGE


@given(CUTS, st.sampled_from(["\n\n", "\r\n\r\n"]), st.booleans())
def test_only_the_event_of_usage_is_left_out(cuts: list[int], end: str, spaces: bool) -> None:
    filtered = {"choices": [], "prompt_filter_results": []}
    events = (filtered, chunk(usage=USAGE), chunk('"choices":[],"usage":{}'), {**LAST, "usage": None})
    rest = sent(*events, end=end, spaces=spaces)
    data = rest + sent(LAST, end=end, spaces=spaces) + sent("[DONE]", end=end)
    out, stream = fed(data, cuts, strip=True)
    assert out == rest + sent("[DONE]", end=end)
    assert stream.usage() == USAGE
    assert stream.complete


@given(CUTS, st.sampled_from(["\n\n", "\r\n\r\n"]))
def test_a_truncated_tail_is_left_out(cuts: list[int], end: str) -> None:
    whole = sent(chunk("a"), chunk("b"), end=end)
    tail = sent(chunk("[DONE]"))[:-4]
    out, stream = fed(whole + tail, cuts)
    assert out == whole
    assert not stream.complete
    assert stream.count == 2


@pytest.mark.parametrize("tail", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n"])
def test_a_last_event_without_its_empty_line_is_an_end(tail: bytes) -> None:
    out, stream = fed(sent(chunk()) + tail, [3])
    assert out == sent(chunk()) + tail
    assert stream.complete


@pytest.mark.parametrize(
    ("api", "text"),
    [
        ("chat", "[DONE]"), ("chat", "data: [DONE]"), ("chat", "\ndata: [DONE]\n\n"),
        ("messages", "message_stop"), ("messages", '{"type":"message_stop"}'),
        ("messages", "event: message_stop\n"),
        ("responses", "response.completed"), ("responses", 'x "type": "response.failed"'),
    ],
)  # fmt: skip
def test_a_text_about_the_end_is_not_the_end(api: str, text: str) -> None:
    out, stream = fed(sent({"type": "content_block_delta", "delta": {"text": text}}), [5], api)
    assert not stream.complete
    assert out


@pytest.mark.parametrize(
    ("api", "event"),
    [
        ("chat", b"data: [DONE]\n\n"),
        ("completions", b"data:[DONE]\r\n\r\n"),
        ("messages", b'event: message_stop\ndata: {"type": "message_stop"}\n\n'),
        ("messages", b'data: {"type":"message_stop"}\n\n'),
        ("responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
        ("responses", b'data: {"type":"response.incomplete","response":{}}\n\n'),
        ("responses", b'event: response.failed\r\ndata: {"type": "response.failed"}\r\n\r\n'),
    ],
)
@given(cuts=CUTS)
def test_the_ends_of_all_apis(api: str, event: bytes, cuts: list[int]) -> None:
    out, stream = fed(event, cuts, api)
    assert out == event
    assert stream.complete


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "out of memory", "code": 500}},
        {"error": "out of memory"},
        {"type": "error", "message": "x"},
        {"type": "error", "error": {"message": "x"}},
    ],
)
@given(cuts=CUTS)
def test_events_of_errors(event: dict[str, Any], cuts: list[int]) -> None:
    data = sent(chunk(), event)
    out, stream = fed(data, cuts)
    assert out == data
    assert stream.failed
    assert not stream.complete


@pytest.mark.parametrize(
    "value", [{"error": None}, chunk('{"error": {}}'), {"x": {"error": {"a": 1}}}, ["error"]]
)
def test_other_events_are_no_errors(value: Any) -> None:
    assert not fed(sent(value), [])[1].failed


def test_a_long_event_is_kept_together_up_to_a_bound() -> None:
    long = sent(chunk("x" * 600_000), "[DONE]")
    stream = EventStream()
    assert stream.feed(long[:500_000]) == b""
    assert stream.feed(long[500_000:]) == long
    endless = EventStream()
    assert endless.feed(b"data: " + b"x" * LONGEST_EVENT) != b""
    assert endless.feed(b"y" * 10) == b""
    assert endless.feed(b"\n\n") == b"y" * 10 + b"\n\n"


@given(st.binary(max_size=200), CUTS, st.booleans(), st.sampled_from(["chat", "messages", "responses"]))
def test_any_bytes_pass_without_an_error(data: bytes, cuts: list[int], strip: bool, api: str) -> None:
    padded = data + b'\n\ndata: {"usage":{},"response":null,"message":3,"error":"","choices":[]}\n\n'
    out, stream = fed(padded, cuts, api, strip=strip)
    assert strip or out == padded
    stream.usage()


def test_usage_of_responses() -> None:
    usage = {"input_tokens": 5, "output_tokens": 2}
    for value in ({"type": "response.completed", "response": {"usage": usage}}, {"usage": usage}):
        assert fed(sent(value), [], "responses")[1].usage() == usage
    for value in ({"usage": None}, {"usage": {}, "response": None}, {"response": {"usage": None}}, {}):
        assert fed(sent(value), [], "responses")[1].usage() is None


def test_the_last_usage_counts() -> None:
    values = [chunk(usage={"prompt_tokens": 10, "completion_tokens": number}) for number in range(1, 4)]
    for cuts in ([], list(range(0, 2000, 50))):
        usage = fed(sent(*values), cuts)[1].usage()
        assert usage == {"prompt_tokens": 10, "completion_tokens": 3}


@given(CUTS)
def test_anthropic_tells_the_prompt_first_and_the_answer_last(cuts: list[int]) -> None:
    events = (
        {"type": "message_start", "message": {"usage": {"input_tokens": 70, "output_tokens": 1}}},
        {"type": "content_block_delta", "delta": {"text": '"usage":{"input_tokens":1}'}},
        {"type": "message_delta", "usage": {"output_tokens": 42}},
        {"type": "message_stop"},
    )
    assert fed(sent(*events), cuts, "messages")[1].usage() == {"input_tokens": 70, "output_tokens": 42}


@pytest.mark.parametrize("api", ["chat", "completions", "messages", "responses"])
def test_an_error_of_the_gateway_can_be_read_back(api: str) -> None:
    event = error_event(api, {"error": {"message": "broke off\n\n", "type": "server_error", "code": "x"}})
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1
    stream = EventStream(api)
    assert stream.feed(event) == event
    assert stream.failed
    data = json.loads(event.partition(b"data: ")[2])
    error = data if api == "responses" else data["error"]
    assert error["message"] == "broke off\n\n"
    assert (b"event: error\n" in event) == (api in ("messages", "responses"))


@pytest.mark.parametrize(
    ("api", "event", "reasoned"),
    [
        ("chat", {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, True),
        ("chat", {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}, False),
        ("chat", chunk('"finish_reason":"stop"'), False),
        ("completions", {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}, True),
        ("messages", {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, True),
        ("messages", {"type": "message_start", "message": {"stop_reason": None}}, False),
        ("responses", {"type": "response.output_text.done", "finish_reason": "stop"}, False),
    ],
)
@given(cuts=CUTS, spaces=st.booleans(), ended=st.booleans())
def test_a_finish_reason_is_seen_without_a_last_event(
    api: str, event: dict[str, Any], reasoned: bool, cuts: list[int], spaces: bool, ended: bool
) -> None:
    """Some engines send no [DONE], and some not even the empty line after their last event."""
    data = sent(chunk("a"), event, spaces=spaces)
    out, stream = fed(data if ended else data[:-2], cuts, api)
    assert out == data
    assert (stream.complete, stream.reasoned) == (False, reasoned)
