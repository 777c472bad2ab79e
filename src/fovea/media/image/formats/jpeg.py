"""JPEG: marker segments, with entropy-coded pixels after each start of scan (ITU-T T.81, annex B)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from fovea.core.errors import InvalidImage
from fovea.media.image.formats import exif
from fovea.media.image.formats.base import (
    MAX_PARTS,
    Facts,
    Format,
    IncompleteHeader,
    fragmentation_error,
    truncation_error,
)

_SOI, _EOI, _SOS, _APP1 = 0xD8, 0xD9, 0xDA, 0xE1
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))
# Application data and comments are removed, except JFIF and Adobe, which determine the colours of components.
_METADATA = (frozenset(range(0xE0, 0xF0)) | {0xFE}) - {0xE0, 0xEE}
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}

# In entropy-coded data, 0xFF is followed by 0 or by the byte of a restart marker. Any other byte begins a
# segment.
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")

_MAX_SCANS = 100
"""Most scans of a progressive JPEG. The decoder visits all pixels for a scan of as few as 100 bytes."""


class _Segment(NamedTuple):
    """The marker and its body, data[start:end]. A start of scan extends to the next marker.

    body: position after marker and length.
    """

    marker: int
    start: int
    body: int
    end: int


def _matches(head: bytes) -> bool:
    return head.startswith(b"\xff\xd8\xff")


def _segments(data: bytes) -> Iterator[_Segment]:
    """Yield every complete segment after SOI, up to EOI. Data after EOI (MPO, motion photos) is ignored."""
    at = 2
    for _ in range(MAX_PARTS):
        while data[at : at + 2] == b"\xff\xff":  # fill bytes
            at += 1
        if at + 2 > len(data):
            return
        if data[at] != 0xFF:
            raise InvalidImage(f"the JPEG is corrupt: no marker at byte {at}")
        segment = _segment(data, at)
        if segment is None:
            return
        yield segment
        if segment.marker == _EOI:
            return
        at = segment.end
    raise fragmentation_error("JPEG")


def _segment(data: bytes, at: int) -> _Segment | None:
    """Return the segment at `at`; None if the bytes end within it."""
    marker = data[at + 1]
    if marker == _EOI or marker in _BARE:
        return _Segment(marker, at, at + 2, at + 2)
    if at + 4 > len(data):
        return None
    length = int.from_bytes(data[at + 2 : at + 4], "big")
    if length < 2:
        raise InvalidImage(f"the JPEG is corrupt: a segment of length {length} at byte {at}")
    end = at + 2 + length
    if end > len(data):
        return None
    if marker == _SOS:
        next_marker = _NEXT_MARKER.search(data, end)
        end = next_marker.start() if next_marker else len(data)
    return _Segment(marker, at, at + 4, end)


def _scan(data: bytes) -> Facts:
    facts: tuple[int, int, str] | None = None
    orientation: int | None = None
    for marker, _, body, end in _segments(data):
        if marker in _FRAME_HEADERS and facts is None:
            facts = _frame(data[body:end])
        elif marker == _APP1 and orientation is None and data.startswith(b"Exif\0\0", body):
            orientation = exif.orientation(data[body:end])
        elif marker in (_SOS, _EOI):
            if facts is None:
                raise InvalidImage("the JPEG is corrupt: its pixels come before its frame header")
            break
    if facts is None:
        raise IncompleteHeader
    return Facts(*facts, orientation=orientation or 1)


def _frame(body: bytes) -> tuple[int, int, str]:
    if len(body) < 6:
        raise InvalidImage("the JPEG is corrupt: its frame header is too short")
    if body[0] != 8:
        raise InvalidImage(f"the JPEG has {body[0]} bits per sample; accepted: 8")
    mode = _MODES.get(body[5])
    if mode is None:
        raise InvalidImage(f"the JPEG has {body[5]} colour components; accepted: 1, 3 or 4")
    return int.from_bytes(body[3:5], "big"), int.from_bytes(body[1:3], "big"), mode


def _essence(data: bytes) -> bytes:
    view = memoryview(data)
    segments: list[memoryview] = [view[:2]]
    scans = 0
    for marker, start, _, end in _segments(data):
        scans += marker == _SOS
        if scans > _MAX_SCANS:
            raise InvalidImage(f"the JPEG has more than {_MAX_SCANS} scans; re-encode it")
        if marker not in _METADATA:
            segments.append(view[start:end])
        if marker == _EOI:
            return b"".join(segments)
    raise truncation_error("JPEG", "its end-of-image marker")


FORMAT = Format("JPEG", "image/jpeg", _matches, _scan, _essence)
