"""Base64 that is decoded in pieces: equal to decoding at once, with the same errors."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.core.errors import InvalidImage
from fovea.media.limits import IMAGE
from fovea.media.source import _decode_part, decode_base64, decode_exactly
from tests.support.thorough import examples

QUICK = settings(max_examples=examples(400), deadline=None, derandomize=True, database=None)
WHITESPACE = " \t\r\n\f\v"
MOST = 1000


def at_once(encoded: str, most: int) -> bytes:
    """The simple reference: every step over the whole text."""
    length = len(encoded.encode()) - sum(encoded.count(space) for space in WHITESPACE)
    size = length // 4 * 3 - encoded.encode()[-8:].count(b"=")
    if size > most:
        raise ValueError(f"the data: URL holds {size} bytes; accepted: at most {most}")
    if not length:
        raise ValueError("the data: URL holds no data after its comma")
    if wrong := re.search(r"[^A-Za-z0-9+/=\s]", encoded, re.ASCII):
        raise ValueError(
            f"the data: URL is not base64: {wrong.group()!r} at character {wrong.start()} of its data; "
            "accepted: A-Z a-z 0-9 + / and = at the end"
        )
    if length % 4:
        raise ValueError(
            f"the data: URL has wrong base64 padding or is cut off: {length} characters; "
            "accepted: a multiple of 4, filled up with ="
        )
    compact = "".join(encoded.split())
    try:
        if compact.endswith("==="):
            raise binascii.Error("Excess padding")
        return binascii.a2b_base64(compact, strict_mode=True)
    except binascii.Error as error:
        raise ValueError(f"the data: URL is not base64: {str(error).lower()}") from None


def assert_equal(encoded: str, piece: int, most: int = MOST) -> None:
    view = memoryview(encoded.encode())
    assert outcome(lambda: decode_base64(view, IMAGE, most, piece)) == outcome(lambda: at_once(encoded, most))


def outcome(decode: Callable[[], bytes]) -> bytes | str:
    """The bytes, or the message of the error."""
    try:
        return decode()
    except (ValueError, InvalidImage) as error:
        return str(error)


@QUICK
@given(data=st.binary(max_size=60), breaks=st.sets(st.integers(0, 90)), piece=st.integers(1, 8))
def test_pieces_equal_the_whole(data: bytes, breaks: set[int], piece: int) -> None:
    text = base64.b64encode(data).decode()
    spaced = "".join(char + "\r\n" * (at in breaks) for at, char in enumerate(text))
    assert_equal(spaced, 4 * piece)


@QUICK
@given(
    text=st.text(alphabet="AbZ9+/====\n\x1c_é", max_size=40), piece=st.integers(1, 5), most=st.integers(0, 40)
)
def test_errors_equal_those_of_the_whole(text: str, piece: int, most: int) -> None:
    assert_equal(text, 4 * piece, most)


@pytest.mark.parametrize("before", range(9))
@pytest.mark.parametrize("pads", range(1, 9))
@pytest.mark.parametrize("after", ["", "A", "AA", "AAA", "A=", "AA=="])
def test_every_place_of_padding(before: int, pads: int, after: str) -> None:
    text = "A" * before + "=" * pads + after
    for piece in (4, 8, 64):
        assert_equal(text, piece)


def test_a_long_run_of_padding_is_not_searched_to_its_end() -> None:
    """Attack: 60 MiB of =, whose every character the search for the fault would read in one call."""
    assert_equal("AAAA" + "=" * 200_000 + "AAAA", 65536, most=10**6)


PARTS = st.text(alphabet='AbQZ9+/=-_\\"\n\x00 é{}u', max_size=12) | st.binary(max_size=30).map(
    lambda data: base64.b64encode(data).decode()
)


@QUICK
@given(parts=st.lists(PARTS, max_size=4), last=st.sampled_from(["", "QQ==", "QR==", "QUI=", "QUJ=", "===="]))
def test_the_fast_decoder_reads_what_pythons_own_reads(parts: list[str], last: str) -> None:
    """It reads JSON's escapes and base64 for URLs, too, and refuses unused bits that are not 0."""
    text = "".join(parts).encode() + last.encode()
    view = memoryview(text[: len(text) // 4 * 4])
    assert _decode_part(view) == decode_exactly(view)
