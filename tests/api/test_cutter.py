"""A body that is cut and restored equals the parsed one. A hostile one is refused before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.api.cut_texts import decode, restore, unescape
from fovea.api.cutter import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_ENTRIES,
    MAX_SKELETON,
    SHORT,
    Cut,
    Cutter,
    has_controls,
)
from fovea.api.wire import MAX_TEXT, MAX_VALUES
from fovea.core.errors import InvalidRequest
from fovea.core.media import Payload
from tests.support.thorough import examples

SLICE = 65536
MIB = 1024 * 1024
QUICK = settings(max_examples=examples(150), deadline=None, derandomize=True, database=None)
PROSE = st.text(max_size=12) | st.sampled_from(
    [
        "x" * SHORT,
        "x" * (SHORT + 1),
        '\\"' * 200,
        "é中😀" * 120,
        "\\" * 301,
        '"' * 300,
        "\n/\t" * 150,
        "[{,:}]" * 60,
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | PROSE,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(PROSE, inner, max_size=5),
    max_leaves=20,
)


def cut(body: bytes, size: int = SLICE) -> Cut:
    cutter = Cutter()
    feed(cutter, body, size)
    return cutter.finish()


def feed(cutter: Cutter, body: bytes, size: int = SLICE) -> None:
    for at in range(0, len(body), size):
        cutter.feed(body[at : at + size])


@QUICK
@given(value=VALUES, ascii=st.booleans(), slashes=st.booleans(), size=st.integers(1, 400))
def test_cut_and_restored_equals_parsed(value: Any, ascii: bool, slashes: bool, size: int) -> None:
    """Slices of any size: they end within escapes, within characters and between brackets."""
    text = json.dumps(value, ensure_ascii=ascii)
    if slashes:
        text = text.replace("/", "\\/")
    body = text.encode()
    assert restore(cut(body, size)) == json.loads(body)


@QUICK
@given(
    text=st.text(max_size=40) | st.text(alphabet='\\"u/😀é', max_size=40),
    ascii=st.booleans(),
    size=st.integers(12, 40),
)
def test_decoding_in_pieces_equals_decoding_at_once(text: str, ascii: bool, size: int) -> None:
    raw = json.dumps(text, ensure_ascii=ascii)[1:-1].encode()
    assert decode(raw, MAX_TEXT, size) == text
    assert (unescape(bytearray(raw), size) or b"").decode() in (text, "")


@QUICK
@given(st.text(alphabet='\\"u/d8c0n{}[],:1 \n', max_size=60), st.integers(1, 9))
def test_wrong_json_is_refused_or_parsed_alike(text: str, size: int) -> None:
    """Whatever the parser says to the body, it says to the skeleton: no text becomes valid by being cut."""
    body = text.encode()
    try:
        expected = json.loads(body)
    except ValueError:
        with pytest.raises((ValueError, InvalidRequest)):
            restore(cut(body, size))
    else:
        assert restore(cut(body, size)) == expected


@pytest.mark.parametrize("size", [1, 500, MAX_DIGITS, MAX_DIGITS + 1])
def test_a_number_is_as_long_in_pieces_as_at_once(size: int) -> None:
    """6,000 digits in TCP segments of 500 passed, since every segment began a new count. Python refuses to
    convert such a number, and the client got 500.
    """
    with pytest.raises(InvalidRequest, match="too many digits; accepted: at most 512") as error:
        feed(Cutter(), b'{"seed":' + b"1" * 6000 + b"}", size)
    assert error.value.code == "invalid_json"
    longest = b'{"a":' + b"1" * MAX_DIGITS + b',"b":[' + b"2" * MAX_DIGITS + b"," + b"3" * MAX_DIGITS + b"]}"
    assert restore(cut(longest, size)) == json.loads(longest)


def test_long_strings_leave_the_skeleton() -> None:
    url = "data:image/png;base64," + "iVBORw0K" * 100_000
    result = cut(json.dumps({"url": url, "text": "x" * 300, "n": [1, 2]}).encode())
    assert len(result.skeleton) < 200
    value = restore(result)
    assert isinstance(value["url"], Payload)
    assert value["url"].data == url.encode()
    assert value["text"] == "x" * 300


@pytest.mark.parametrize(
    "head", ["data:image/png", "DATA:IMAGE/PNG", "  data:image/png", "\\n data:image\\/png"]
)
def test_a_data_url_stays_bytes_however_it_is_written(head: str) -> None:
    """PHP writes \\/ for every slash, and some clients send a newline before the URL."""
    body = ('{"url": "' + head + ";base64," + "ab\\/d" * 100 + '"}').encode()
    url = restore(cut(body))["url"]
    assert isinstance(url, Payload)
    assert bytes(url.data).decode() == json.loads(body)["url"]


def test_other_texts_stay_text() -> None:
    for key, text in (("url", "https://a/" + "x" * 500), ("text", "data:" + "x" * 500)):
        assert restore(cut(json.dumps({key: text}).encode())) == {key: text}


def test_nobody_can_send_a_placeholder() -> None:
    """A placeholder holds 128 random bits, so a body cannot make one string appear twice."""
    first, second = cut(b'["%s"]' % (b"x" * 300)), cut(b'["%s"]' % (b"x" * 300))
    assert first.skeleton != second.skeleton


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"url": "data:' + b"x" * 500, json.JSONDecodeError),
        (b'["' + b"x" * 500 + b"\n" + b'"]', InvalidRequest),
        (b'["' + b"x" * 500 + b'\\x"]', json.JSONDecodeError),
        (b'["' + b"x" * 500 + b'\\u12"]', json.JSONDecodeError),
        (b'["' + b"x" * 500 + b'\xff"]', UnicodeDecodeError),
        (b'{"url": "data:' + b"x" * 500 + b'\xc3"}', UnicodeDecodeError),
        (b'{"url": "data:' + b"x" * 500 + b'\\x"}', json.JSONDecodeError),
        ('{"a": 1}'.encode("utf-16"), UnicodeDecodeError),
    ],
)
def test_wrong_strings(body: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        restore(cut(body))


def test_byte_order_mark_is_accepted() -> None:
    assert restore(cut(b'\xef\xbb\xbf{"a": 1}')) == {"a": 1}


def test_half_a_surrogate_pair_in_a_data_url_becomes_text_which_the_schema_refuses() -> None:
    value = restore(cut(b'{"url": "data:' + b"x" * 500 + b'\\ud800"}'))
    assert value["url"].endswith("\ud800")


def test_texts_have_a_limit_together() -> None:
    """Attack: sixteen texts of 4 MB each; none is too long alone."""
    body = json.dumps({"a": ["x" * (MAX_TEXT // 2)] * 2, "b": {"c": ["y" * 300]}}).encode()
    with pytest.raises(
        InvalidRequest, match=r"^b.c\[0\]: the texts of the body have more than 4000000"
    ) as caught:
        restore(cut(body))
    assert caught.value.param == "b.c[0]"


# ---- attacks: each would stop the event loop for seconds if Python's parser got the whole body

TOTAL = 8 * MIB


def many(unit: bytes) -> bytes:
    return unit * (TOTAL // len(unit))


HOSTILE = {
    "nested lists": (b"[" * TOTAL, "nested too deeply"),
    "nested objects": (many(b'{"a":'), "nested too deeply"),
    "lists beside each other": (b"[" + many(b"[],"), "too many values"),
    "lists of lists of lists": (b"[" + many(b"[[[[]]]],"), "too many values"),
    "objects": (b"[" + many(b"{},"), "too many values"),
    "short strings": (b"[" + many(b'"",'), "too many values"),
    "quotes": (many(b'"'), "too many values"),
    "strings of escapes": (b"[" + many(b'"\\"",'), "too many values"),
    "keys": (b"{" + many(b'"k":1,'), "too many values"),
    "token ids": (b"[" + many(b"1,"), "more than 200000 entries"),
    "flags": (b"[" + many(b"true,"), "more than 200000 entries"),
    "spaces": (b" " * TOTAL, f"more than {MAX_SKELETON} bytes"),
    "floats": (b"[" + many(b"1.2345678901234567,"), "more than"),
    "digits": (b"9" * TOTAL, "too many digits"),
    "long numbers": (b"[" + many(b"9" * 4000 + b","), "too many digits"),
    "closing brackets": (b"]" * TOTAL, f"more than {MAX_SKELETON} bytes"),
    "strings of medium length": (b"[" + many(b'"' + b"x" * SHORT + b'",'), "too many values|more than"),
    "strings of many escapes": (b"[" + many(b'"' + b"\\n" * 33 + b'",'), "too many values|more than"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_while_it_arrives(name: str) -> None:
    """60 MiB of nested lists were parsed for eight seconds before they were counted."""
    body, message = HOSTILE[name]
    cutter = Cutter()
    with pytest.raises(InvalidRequest, match=message):
        feed(cutter, body)
    assert len(cutter.finish().skeleton) <= MAX_SKELETON + SLICE


@pytest.mark.parametrize(
    "unit", [b"x", b'\\"', b"\\/", b"\\u00e9", "é".encode(), b"\\\\", b"[{,", b"\\ud83d\\ude00"]
)
def test_one_long_string_is_one_payload(unit: bytes) -> None:
    text = b'["' + unit * (MIB // len(unit)) + b'"]'
    result = cut(text)
    assert len(result.strings) == 1
    assert len(result.skeleton) < 100
    assert restore(result) == json.loads(text)


def test_structure_within_strings_is_not_counted() -> None:
    """A program or a table in a message has many commas and brackets."""
    body = [',[{"' * 20] * (MAX_VALUES // 2)
    assert restore(cut(json.dumps(body).encode())) == body


@pytest.mark.parametrize("close", [True, False])
def test_limits_are_exact(close: bool) -> None:
    assert restore(cut(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH))
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        cut(b"[" * (MAX_DEPTH + 1) + b"]" * MAX_DEPTH * close)
    assert len(restore(cut(b"[" + b"1," * MAX_ENTRIES + b"1]"))) == MAX_ENTRIES + 1
    with pytest.raises(InvalidRequest, match="entries"):
        cut(b"[" + b"1," * (MAX_ENTRIES + 1) + b"1]" * close)
    assert restore(cut(b"9" * MAX_DIGITS)) == int("9" * MAX_DIGITS)


def test_lists_beside_each_other_are_not_deep() -> None:
    """The depth follows the order of brackets, across slices."""
    body = b"[" + b",".join([b"[[[]]]"] * 1000) + b"]"
    for size in (7, 100, SLICE):
        assert restore(cut(body, size)) == json.loads(body)


@QUICK
@given(size=st.integers(0, 9000), place=st.integers(0, 9000), byte=st.integers(0, 255))
def test_control_characters_are_noticed_in_short_and_long_texts(size: int, place: int, byte: int) -> None:
    text = bytearray(b"a" * size)
    text[place : place + 1] = bytes([byte])
    assert has_controls(bytes(text)) == (byte < 32)


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("data:image/png;base64," + "A" * 10_000, False),
        ("data:image/png;base64," + "\\u0041" * 10_000, True),
        ("data:" + "é" * 10_000, True),
        ("word " * 10_000, True),
    ],
    ids=["data URL", "escapes", "not ASCII", "text"],
)
def test_only_plain_data_urls_cost_nothing_to_parse(text: str, counted: bool) -> None:
    """The others are decoded, which takes time in proportion to their length."""
    cutter = Cutter()
    cutter.feed(('{"messages": ["' + text + '"]}').encode())
    assert (cutter.text_bytes > 10_000) == counted
