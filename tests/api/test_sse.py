"""Server-sent events, cut into reads at any byte."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from fovea.api import sse


@given(st.lists(st.text()), st.lists(st.integers(1, 30), min_size=1))
def test_events_survive_any_cut_of_the_stream(texts: list[str], sizes: list[int]) -> None:
    data = b"".join(sse.event({"text": text}) for text in texts) + sse.DONE
    decoder, payloads, position = sse.Decoder(), [], 0
    while position < len(data):
        size = sizes[position % len(sizes)]
        payloads += decoder.feed(data[position : position + size])
        position += size
    assert [json.loads(payload)["text"] for payload in payloads[:-1]] == texts
    assert payloads[-1] == "[DONE]"


def test_event_forms_of_other_servers() -> None:
    decoder = sse.Decoder()
    assert decoder.feed(b": ping\r\n\r\nevent: x\r\nid: 1\r\ndata:{}\r\n\r\n") == ["{}"]
    assert decoder.feed(b"data: one\ndata: two\n") == []
    assert decoder.feed(b"\n") == ["one\ntwo"]
    assert decoder.feed(b"data: \xff\n\n") == ["\ufffd"]


def test_comments_can_be_counted_as_events() -> None:
    decoder = sse.Decoder(comments=True)
    assert decoder.feed(b": one\n\ndata: 1\n\n:two\n") == ["", "1", ""]


def test_bytes_of_an_incomplete_event_are_counted() -> None:
    decoder = sse.Decoder()
    assert decoder.feed(b"data: one\ndata: t") == []
    assert decoder.held == len(b"one") + len(b"data: t")
    assert decoder.feed(b"wo\n\n") == ["one\ntwo"]
    assert decoder.held == 0
