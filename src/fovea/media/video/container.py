"""Detects a video's container, and whether the file is truncated, from the sizes that the file states.

Decoders decode the rest of a truncated file without an error, so this module checks for truncation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Literal

Container = Literal["mp4", "webm"]
MEDIA_TYPES: dict[Container, str] = {"mp4": "video/mp4", "webm": "video/webm"}
MAX_PARTS = 10_000
"""Parts that are looked at. Real files have a few; a hostile one has millions of 8 bytes."""
_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"
_IMAGE_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
_MP4_FIRST = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")


def container_of(data: bytes) -> Container | None:
    """Return the container of a file; None if it is not a video. Images in MP4 boxes (AVIF, HEIC) are not."""
    if data.startswith(_EBML):
        return "webm"
    if data[4:8] in _MP4_FIRST and data[8:12] not in _IMAGE_BRANDS:
        return "mp4"
    return None


def is_truncated(data: bytes, container: Container) -> bool:
    """Whether one of the file's first MAX_PARTS top-level parts extends beyond its end."""
    parts = _boxes(data) if container == "mp4" else _elements(data)
    return any(end > len(data) for end in islice(parts, MAX_PARTS))


def _boxes(data: bytes) -> Iterator[int]:
    """Yield the end of each top-level box of an MP4.

    Size 1 means that a 64-bit size follows; size 0 means the rest of the file.
    """
    at = 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if size < 8:
            return
        at += size
        yield at


def _elements(data: bytes) -> Iterator[int]:
    """Yield the end of each top-level element of a WebM.

    The segment of a live stream states no size and is accepted without this check.
    """
    at = 0
    while at + 5 < len(data):
        identifier = data[at : at + 4]
        at += 4
        width = 9 - data[at].bit_length()
        if identifier not in (_EBML, _SEGMENT) or width > 8:
            return
        size = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
        if size == (1 << 7 * width) - 1:
            return
        at += width + size
        yield at
