"""Events on the wire, however they are cut."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from fovea.api import sse


@given(st.lists(st.text()), st.lists(st.integers(1, 30), min_size=1))
def test_what_was_written_is_read_wherever_it_is_cut(texts: list[str], sizes: list[int]) -> None:
    data = b"".join(sse.event({"text": text}) for text in texts) + sse.DONE
    decoder, found, position = sse.Decoder(), [], 0
    while position < len(data):
        size = sizes[position % len(sizes)]
        found += decoder.feed(data[position : position + size])
        position += size
    assert [json.loads(payload)["text"] for payload in found[:-1]] == texts
    assert found[-1] == "[DONE]"


def test_other_servers_write_otherwise() -> None:
    decoder = sse.Decoder()
    assert decoder.feed(b": ping\r\n\r\nevent: x\r\nid: 1\r\ndata:{}\r\n\r\n") == ["{}"]
    assert decoder.feed(b"data: one\ndata: two\n") == []
    assert decoder.feed(b"\n") == ["one\ntwo"]
    assert decoder.feed(b"data: \xff\n\n") == ["\ufffd"]
