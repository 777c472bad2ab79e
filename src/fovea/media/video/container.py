"""Which container a video's bytes are in, and whether they are all there: from sizes that the file itself states.

Decoders show what is left of a cut file without a word, so a cut is looked for here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Container = Literal["mp4", "webm"]
MEDIA_TYPES: dict[Container, str] = {"mp4": "video/mp4", "webm": "video/webm"}
_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"
_PICTURES = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
_MP4_FIRST = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")


def container_of(data: bytes) -> Container | None:
    """None for what is neither; pictures in an MP4 container (AVIF, HEIC) are no videos."""
    if data.startswith(_EBML):
        return "webm"
    if data[4:8] in _MP4_FIRST and data[8:12] not in _PICTURES:
        return "mp4"
    return None


def cut_off(data: bytes, container: Container) -> bool:
    """Whether the file's outermost parts reach beyond its end."""
    parts = _boxes(data) if container == "mp4" else _elements(data)
    return any(end > len(data) for end in parts)


def _boxes(data: bytes) -> Iterator[int]:
    """Where each outermost box of an MP4 ends. Size 1 is a 64-bit size, 0 the rest of the file."""
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
    """Where each outermost element of a WebM ends; a live stream's segment states no size and is taken as it is."""
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
