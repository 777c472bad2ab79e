"""Decodes the base64 text of data: URLs a piece at a time.

Other threads run between two pieces: one call for 60 MiB would stop the event loop for a tenth of a second.
A text without whitespace, which is the rule, is read once. Any other one is checked step by step, so that the
error can name the first thing that is wrong.
"""

from __future__ import annotations

import binascii
import io
import re
from collections.abc import Iterator

from fovea.media.kind import Kind

PIECE = 1024 * 1024
"""Bytes of text that are decoded in one call, about a millisecond each. A multiple of 4."""
_WHITESPACE = b" \t\r\n\f\v"
_NOT_BASE64 = re.compile(rb"[^A-Za-z0-9+/=\s]")
_PAD = ord("=")


def decode_base64(text: memoryview, kind: Kind, most: int, piece: int = PIECE) -> bytes:
    """Decode a text, in which whitespace is ignored.

    most: accepted bytes; more are refused before anything is decoded. Raises InvalidMedia.
    """
    if len(text) % 4 == 0 and 0 < len(text) // 4 * 3 <= most:
        data = _decode_plain(text, piece)
        if data is not None:
            return data
    length = _check(text, kind, most, piece)
    compact = bytearray()
    for part in _pieces(text, piece):
        compact += part.translate(None, _WHITESPACE)
    assert len(compact) == length
    data = _decode_plain(memoryview(compact), piece)
    if data is None:
        raise kind.invalid(f"the data: URL is not base64: {_padding_error(compact)}")
    return data


def _decode_plain(text: memoryview, piece: int) -> bytes | None:
    """Decode a text of a multiple of 4 characters. None if it is not plain base64, padded at its end only."""
    data = io.BytesIO()  # unlike a join, it ends without a copy of the whole
    try:
        for at in range(0, len(text), piece):
            part = text[at : at + piece]
            if part[-1] == _PAD and (at + piece < len(text) or bytes(part[-3:]) == b"==="):
                return None
            data.write(binascii.a2b_base64(part, strict_mode=True))
    except binascii.Error:
        return None
    return data.getvalue()


def _check(text: memoryview, kind: Kind, most: int, piece: int) -> int:
    """Return the number of characters that are not whitespace. Raises InvalidMedia."""
    length = sum(len(part.translate(None, _WHITESPACE)) for part in _pieces(text, piece))
    size = length // 4 * 3 - bytes(text[-8:]).count(b"=")
    if size > most:
        raise kind.invalid(f"the data: URL holds {size} bytes; accepted: at most {most}", "{noun}_too_large")
    if not length:
        raise kind.invalid("the data: URL holds no data after its comma")
    at = 0
    for part in _pieces(text, piece):
        if wrong := _NOT_BASE64.search(part):
            position = at + wrong.start()
            character = bytes(text[position : position + 4]).decode("utf-8", "replace")[0]
            raise kind.invalid(
                f"the data: URL is not base64: {character!r} at character {position} of its data; "
                "accepted: A-Z a-z 0-9 + / and = at the end"
            )
        at += len(part)
    if length % 4:
        raise kind.invalid(
            f"the data: URL has wrong base64 padding or is cut off: {length} characters; "
            "accepted: a multiple of 4, filled up with ="
        )
    return length


def _padding_error(text: bytearray) -> str:
    """Describe what is wrong with the padding. Every other fault is known already.

    The parser's verdict depends on the characters around the first = only, so it gets no more of them.
    """
    if text.endswith(b"==="):  # Python's strict mode accepts this
        return "excess padding"
    first = text.find(b"=")
    run = bytes(text[first : first + 65536])
    rest = run.lstrip(b"=")[:4] or b"A"
    try:
        binascii.a2b_base64(text[max(0, first - first % 4 - 4) : first] + run[:2] + rest, strict_mode=True)
    except binascii.Error as error:
        return str(error).lower()
    return "wrong padding"


def _pieces(text: memoryview, piece: int) -> Iterator[bytes]:
    return (bytes(text[at : at + piece]) for at in range(0, len(text), piece))
