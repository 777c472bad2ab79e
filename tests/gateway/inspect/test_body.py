"""The body of a request: every value survives, and placeholders cannot be forged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.errors import InvalidRequest
from fovea.core.media import Payload
from fovea.gateway.inspect.body import Body, Prefixed
from tests.gateway.samples import body, cut

NONCE = "0123456789abcdef" * 2
TEXTS = st.one_of(
    st.text(st.characters(), max_size=20),
    st.builds(lambda text, times: text * times, st.text(st.characters(), max_size=12), st.integers(20, 90)),
    st.sampled_from(
        [f"{NONCE}:0", f"data:image/png;base64,{NONCE}:0", f'"{NONCE}:1', f'\\"{NONCE}:0\\', "data:a;base64,"]
    ),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def same(data: bytes, value: Any) -> bool:
    """Whether some JSON has a value, with the order of its fields and the types of its numbers."""
    return json.dumps(json.loads(data)) == json.dumps(value)


@given(st.dictionaries(TEXTS, VALUES, max_size=4), st.integers(1, 700))
def test_every_value_is_written_as_it_arrived(value: dict[str, Any], size: int) -> None:
    sent = json.dumps(value).encode()
    parsed = cut(sent, size)
    assert same(parsed.encoded(), json.loads(sent))
    assert parsed.size == len(sent)
    assert parsed.resolved({}) == json.loads(sent)


@given(st.text(max_size=40), st.integers(1, 60))
def test_text_that_is_not_escaped_survives(text: str, times: int) -> None:
    value = {text * times: [text * times, text]}
    assert json.loads(cut(json.dumps(value, ensure_ascii=False).encode(), 7).encoded()) == value


@pytest.mark.parametrize("name", ["model", "k" * 300, "\\u006b" * 60], ids=["short", "long", "escaped"])
def test_of_two_fields_with_one_name_only_the_last_is_forwarded(name: str) -> None:
    sent = b'{"%b":"first","x":1,"%b":{"deep":["last"]}}' % (name.encode(), name.encode())
    written = cut(sent).encoded()
    assert same(written, json.loads(sent))
    assert b"first" not in written


def test_one_long_name_in_two_spellings_is_one_name() -> None:
    sent = b'{"a":[{"%b":1,"%b":2}]}' % (b"k" * 300, b"\\u006b" + b"k" * 299)
    written = cut(sent).encoded()
    assert json.loads(written) == {"a": [{"k" * 300: 2}]}
    assert b":1" not in written


def test_placeholders_of_other_bodies_are_plain_text() -> None:
    first = body({"url": "a" * 1000})
    placeholder = first.value["url"]
    for text in (placeholder, f"data:image/png;base64,{placeholder}"):
        forged = body({"text": text, "url": "b" * 1000})
        assert json.loads(forged.encoded()) == {"text": text, "url": "b" * 1000}
        assert not forged.is_long(forged.value["text"])


def test_a_long_string_is_not_copied_into_the_text() -> None:
    long = "x" * 100_000
    pieces = list(body({"a": long, "b": [long]}).pieces())
    assert sum(len(piece) > 50_000 for piece in pieces) == 2
    assert max(len(piece) for piece in pieces) == len(long)


def test_length_raw_and_text() -> None:
    parsed = body({"short": "é", "long": "é" * 300})
    long = parsed.value["long"]
    assert parsed.is_long(long)
    assert not parsed.is_long("é")
    assert parsed.raw(long) == b"\\u00e9" * 300
    assert parsed.raw("é") == "é".encode()
    assert parsed.length(long) == 1800
    assert parsed.text(long) == "é" * 300
    assert parsed.text("é") == "é"


def test_markers_stand_for_images() -> None:
    parsed = body({"url": "u" * 500, "text": "t" * 500, "k" * 500: [1, None]})
    assert parsed.resolved({parsed.value["url"]: "image 0"}) == {
        "url": "image 0", "text": "t" * 500, "k" * 500: [1, None],
    }  # fmt: skip


@pytest.mark.parametrize("value", [{}, {"long": "y" * 500}], ids=["without long strings", "with one"])
def test_put_adds_a_string(value: dict[str, Any]) -> None:
    parsed = body(value)
    parsed.value["url"] = parsed.put(b"data:image/png;base64,AAAA")
    parsed.value["other"] = parsed.put(bytearray(b"B" * 10))
    assert json.loads(parsed.encoded()) == {**value, "url": "data:image/png;base64,AAAA", "other": "B" * 10}


@pytest.mark.parametrize("data", ["QUJD", "QUJD" * 200], ids=["short", "long"])
def test_an_image_in_two_parts_is_written_as_one_string(data: str) -> None:
    parsed = body({"data": data, "other": "z" * 400})
    changed = parsed.with_value({"url": Prefixed("data:image/png;base64,", parsed.value["data"]), "n": [1]})
    assert json.loads(changed.encoded()) == {"url": f"data:image/png;base64,{data}", "n": [1]}
    assert changed.resolved({parsed.value["data"]: "image 0"}) == {"url": "image 0", "n": [1]}
    assert changed.size == parsed.size


def test_a_long_data_url_is_bytes_and_any_other_url_is_text() -> None:
    remote = f"https://store.example/{'p' * 300}?X-Amz-Signature={'0' * 600}"
    inline = f"data:image/png;base64,{'A' * 400}"
    parsed = cut(json.dumps({"r": remote, "i": inline, "s": "data:,"}).replace("/", "\\/").encode())
    assert parsed.payload(parsed.value["r"]) == remote
    payload = parsed.payload(parsed.value["i"])
    assert isinstance(payload, Payload)
    assert payload.data == inline.encode()
    assert parsed.payload(parsed.value["s"]) == "data:,"
    assert parsed.unescaped(parsed.value["r"]) == remote.encode()


@pytest.mark.parametrize(
    "inside", [b"\\q" * 200, b"\xff" * 300, b"\\ud800" * 60, b"\xed\xa0\x80" * 100],
    ids=["escape", "bytes", "half a pair", "half a pair as bytes"],
)  # fmt: skip
def test_a_url_that_is_no_unicode_is_refused(inside: bytes) -> None:
    parsed = cut(b'{"url":"%b"}' % inside)
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        parsed.payload(parsed.value["url"])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"{", "not JSON"),
        (b'{"a":1}x', "not JSON"),
        (b'{"a":"%b' % (b"x" * 500), "not JSON"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b'{"a":"\xed\xa0\x80"}', "UTF-8"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "-Infinity"),
        (b'{"a":[1e999]}', "too large"),
        (b'{"a":%b}' % (b"9" * 600), "digits"),
        (b'{"a":"\x00"}', "not JSON"),
        ('{"a":1}'.encode("utf-16"), "not JSON"),
        ('{"a":1}'.encode("utf-32-le"), "not JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        cut(data)
    assert caught.value.code == "invalid_json"


def test_a_mark_of_utf_8_is_accepted() -> None:
    assert cut(b'\xef\xbb\xbf{"a":1}').value == {"a": 1}


@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    try:
        parsed = cut(data, 5)
    except InvalidRequest:
        return
    assert isinstance(parsed, Body)
    json.loads(parsed.encoded())
