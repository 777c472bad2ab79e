"""JPEG: marker segments, with entropy-coded pixels after each start of scan (ITU-T T.81, annex B)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from fovea.core.errors import InvalidImage
from fovea.media.image import base
from fovea.media.image.base import Facts, Format, IncompleteHeader, fragmentation_error, truncation_error

_SOI, _EOI, _SOS, _APP1 = 0xD8, 0xD9, 0xDA, 0xE1
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# The others are lossless, hierarchical or arithmetic-coded. Browsers show none of them, so few but
# attackers would reach these parts of a decoder.
_ACCEPTED_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))
# Application data and comments are removed, except JFIF and Adobe, which determine the colours of components.
_METADATA = (frozenset(range(0xE0, 0xF0)) | {0xFE}) - {0xE0, 0xEE}
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}

# In entropy-coded data, 0xFF is followed by 0 or by the byte of a restart marker. Any other byte begins a
# segment.
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")

_MAX_FILL = 1024
_FILL = re.compile(rb"\xff{0,%d}" % (_MAX_FILL + 2))
"""Matches the fill bytes before a marker and the marker's own 0xFF. Real files have a few bytes, if any."""

_MAX_SEGMENTS = 4_000
"""Most segments. Real files have tens; 20 MiB of metadata in the largest segments are 320."""

_SCAN_HEADER_BYTES = 9
"""A scan has four components at most, two bytes each, after their number. More than four are an error."""

_MAX_SCANS = 100
"""Most scans of a progressive JPEG. Encoders make about ten."""

_MAX_VISITS = 800_000_000
"""Most samples that all scans together visit: about a second of decoding.

For each scan the decoder visits all samples of its components, even if the scan has only a few bytes. The
standard progression of libjpeg visits 8 per pixel, and 14 if the colours have full resolution.
"""


class _Segment(NamedTuple):
    """The marker and its body, data[start:end]. A start of scan extends to the next marker.

    body: position after marker and length.
    """

    marker: int
    start: int
    body: int
    end: int


class _Frame(NamedTuple):
    """A frame header. blocks: blocks of each component per unit of sampling, by the component's id."""

    width: int
    height: int
    mode: str
    blocks: dict[int, int]

    def visits(self, components: bytes) -> int:
        """Return how many samples a scan of the components with these ids visits."""
        share = sum(self.blocks.get(component, 0) for component in components)
        return self.width * self.height * share // max(self.blocks.values())


def _matches(head: bytes) -> bool:
    return head.startswith(b"\xff\xd8\xff")


def read_segments(data: bytes, *, scans: bool) -> Iterator[_Segment]:
    """Yield every complete segment after SOI, up to EOI. Data after EOI (MPO, motion photos) is ignored.

    scans: whether to search the ends of scans. If not, the first start of scan is the last segment.
    """
    at = 2
    for _ in range(_MAX_SEGMENTS):
        at = _marker_at(data, at)
        if at + 2 > len(data):
            return
        segment = _segment(data, at)
        if segment is None:
            return
        if segment.marker == _SOS and scans:
            next_marker = _NEXT_MARKER.search(data, segment.end)
            segment = segment._replace(end=next_marker.start() if next_marker else len(data))
        yield segment
        if segment.marker == _EOI or (segment.marker == _SOS and not scans):
            return
        at = segment.end
    raise fragmentation_error("JPEG", _MAX_SEGMENTS)


def _marker_at(data: bytes, at: int) -> int:
    """Return the position of the marker that follows at `at`, after fill bytes, which are 0xFF, too."""
    match = _FILL.match(data, at)
    end = match.end() if match else at
    if end - at > _MAX_FILL + 1:
        raise InvalidImage(f"the JPEG has more than {_MAX_FILL} fill bytes at byte {at}; re-encode it")
    if end == at and at + 2 <= len(data):
        raise InvalidImage(f"the JPEG is corrupt: no marker at byte {at}")
    return max(at, end - 1)


def _segment(data: bytes, at: int) -> _Segment | None:
    """Return the segment at `at`, without the pixels of a scan; None if the bytes end within it."""
    marker = data[at + 1]
    if marker == _EOI or marker in _BARE:
        return _Segment(marker, at, at + 2, at + 2)
    if at + 4 > len(data):
        return None
    length = int.from_bytes(data[at + 2 : at + 4], "big")
    if length < 2:
        raise InvalidImage(f"the JPEG is corrupt: a segment of length {length} at byte {at}")
    end = at + 2 + length
    return None if end > len(data) else _Segment(marker, at, at + 4, end)


def _scan(data: bytes) -> Facts:
    frame: _Frame | None = None
    block: bytes | None = None
    xmp = b""
    for marker, _, body, end in read_segments(data, scans=False):
        if marker in _FRAME_HEADERS and frame is None:
            frame = read_frame(marker, data[body:end])
        elif marker == _APP1 and block is None and data.startswith(b"Exif\0\0", body):
            block = data[body:end]
        elif marker == _APP1 and data.startswith(_XMP, body):
            xmp = data[body + len(_XMP) : end]
        elif marker in (_SOS, _EOI) and frame is None:
            raise InvalidImage("the JPEG is corrupt: its pixels come before its frame header")
    if frame is None:
        raise IncompleteHeader
    return Facts(frame.width, frame.height, frame.mode, orientation=base.upright_by(block, xmp))


def read_frame(marker: int, body: bytes) -> _Frame:
    if marker not in _ACCEPTED_FRAMES:
        raise InvalidImage(
            f"the JPEG is coded by method {marker - 0xC0} (lossless, hierarchical or arithmetic); "
            "accepted: 0, 1 and 2 (baseline, extended and progressive)"
        )
    if len(body) < 6:
        raise InvalidImage("the JPEG is corrupt: its frame header is too short")
    if body[0] != 8:
        raise InvalidImage(f"the JPEG has {body[0]} bits per sample; accepted: 8")
    mode = _MODES.get(body[5])
    if mode is None:
        raise InvalidImage(f"the JPEG has {body[5]} colour components; accepted: 1, 3 or 4")
    if len(body) < 6 + 3 * body[5]:
        raise InvalidImage("the JPEG is corrupt: its frame header is too short")
    blocks: dict[int, int] = {}
    for at in range(6, 6 + 3 * body[5], 3):
        across, down = body[at + 1] >> 4, body[at + 1] & 15
        if not (1 <= across <= 4 and 1 <= down <= 4):
            raise InvalidImage(f"the JPEG is corrupt: sampling factors {across}x{down}; accepted: 1 to 4")
        # If two components have one id, the larger counts.
        blocks[body[at]] = max(across * down, blocks.get(body[at], 0))
    return _Frame(int.from_bytes(body[3:5], "big"), int.from_bytes(body[1:3], "big"), mode, blocks)


def _essence(data: bytes) -> bytes:
    view = memoryview(data)
    segments: list[memoryview] = [view[:2]]
    frame: _Frame | None = None
    scans = visits = 0
    for marker, start, body, end in read_segments(data, scans=True):
        if marker in _FRAME_HEADERS:
            if frame is not None:
                raise InvalidImage("the JPEG has more than one frame header; accepted: one frame header")
            frame = read_frame(marker, data[body:end])
        elif marker == _SOS and frame is not None:
            scans += 1
            visits += frame.visits(_components(data[body : body + _SCAN_HEADER_BYTES]))
            _check_scans(scans, visits, frame)
        if marker not in _METADATA:
            segments.append(view[start:end])
        if marker == _EOI:
            return b"".join(segments)
    raise truncation_error("JPEG", "its end-of-image marker")


def _components(scan_header: bytes) -> bytes:
    """Return the ids of the components of a scan."""
    return scan_header[1 : 1 + 2 * scan_header[0] : 2] if scan_header else b""


def _check_scans(scans: int, visits: int, frame: _Frame) -> None:
    if scans > _MAX_SCANS:
        raise InvalidImage(f"the JPEG has more than {_MAX_SCANS} scans; re-encode it")
    if visits > _MAX_VISITS:
        raise InvalidImage(
            f"the JPEG is too costly to decode: {scans} scans of {frame.width}x{frame.height} pixels visit "
            f"{visits} samples; accepted: at most {_MAX_VISITS}; re-encode it with fewer scans",
            code="image_too_large",
        )


FORMAT = Format("JPEG", "image/jpeg", _matches, _scan, _essence)
