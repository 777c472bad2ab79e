"""Server-sent events: the parser gives the same events however the bytes are cut, and no event is fatal."""

from __future__ import annotations

import json

from fovea.api.sse import Decoder, event
from fovea.bench.client import record_event
from fovea.bench.measure import Sample
from tests.fuzz.refusals import note, refusals

LONGEST = 4096
WORDS = (
    b"data:", b"data: ", b"\n", b"\r\n", b"\n\n", b"\r", b": comment", b"event: x", b"id:", b"retry:",
    b"[DONE]", b'{"error":', b'"choices"', b'"delta"', b'"content"', b'"finish_reason"', b'"usage"',
    b'"prompt_tokens_details"', b"null", b"[]", b"{}", b"[1]", b'"a"', b"1e999", b"NaN", b"\\ud800", b"\xff",
    b"\xe2\x80\xa8", b"[" * 64,
)  # fmt: skip


def target(data: bytes) -> None:
    whole = Decoder().feed(data)
    for size in (1, 7, 64):
        decoder = Decoder()
        pieces = [
            payload for at in range(0, len(data), size) for payload in decoder.feed(data[at : at + size])
        ]
        assert pieces == whole, f"pieces of {size} bytes give other events"
    sample = Sample(0.0, "", 0, 1)
    for payload in whole:
        failure = record_event(payload, 0.0, sample)
        note(
            failure.kind
            if failure is not None
            else f"{len(sample.events) > 0} {sample.finish_reason is not None}"
        )
    with refusals():
        text = data.decode("utf-8", "replace")
        written = event({"text": text})
        assert written.endswith(b"\n\n")
        assert written.count(b"\n") == 2
        (payload,) = Decoder().feed(written)
        assert json.loads(payload) == {"text": text}
        assert len(payload.splitlines()) == 1


def seeds() -> list[bytes]:
    def line(value: object) -> bytes:
        return b"data: " + json.dumps(value).encode() + b"\n\n"

    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}
    odd: list[object] = [
        {"choices": [None]}, {"choices": [{"delta": [1]}]}, {"choices": {"a": 1}}, {"choices": 1},
        {"usage": [1]}, {"usage": {"prompt_tokens_details": 1}}, {"error": []},
        {"error": {"message": {"a": 1}}}, {"error": 5}, [], 1, "a", {"choices": [{"delta": {"content": 5}}]},
    ]  # fmt: skip
    return [
        line(chunk) + line(end) + b"data: [DONE]\n\n", b": ping\n\nevent: x\ndata: a\ndata: b\n\n",
        b"data:x\r\n\r\n", b"data: " + b"[" * 3000 + b"\n\n", b"\xef\xbb\xbfdata: a\n\n",
        "data: \u2028\n\n".encode(), *map(line, odd),
    ]  # fmt: skip
