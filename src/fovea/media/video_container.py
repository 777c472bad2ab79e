"""Detects a video's container, and whether the file is truncated or its structure is damaged.

FFmpeg reads the rest of such a file without an error, so this module checks the sizes that the file states.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Literal

from fovea.core.errors import InvalidVideo

Container = Literal["mp4", "webm"]
MEDIA_TYPES: dict[Container, str] = {"mp4": "video/mp4", "webm": "video/webm"}
MAX_PARTS = 10_000
"""Parts that are looked at. Real files have a few; a hostile one has millions of 8 bytes."""
DAMAGED = "video_damaged"
UNDAMAGED = "send an undamaged file"
MAX_ELEMENTS = 300_000
"""Most elements of a WebM that are checked. Ten minutes have 36,000 frames and 30,000 pieces of sound."""
_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"
_CLUSTER, _GROUP, _BLOCKS = b"\x1fC\xb6u", b"\xa0", (b"\xa1", b"\xa3")
_TRACKS, _TRACK, _TRACK_NUMBER, _TRACK_TYPE = b"\x16T\xaek", b"\xae", b"\xd7", b"\x83"
_VIDEO = 1
_PARTS = {
    parent: frozenset(bytes.fromhex(name) for name in [*names.split(" "), "ec", "bf"])
    for parent, names in {
        b"": "1a45dfa3 18538067",
        _SEGMENT: "114d9b74 1549a966 1654ae6b 1f43b675 1c53bb6b 1941a469 1043a770 1254c367",
        _CLUSTER: "e7 5854 a7 ab a3 a0 af",
        _GROUP: "a1 a2 75a1 9b fa fb fd a4 75a2 8e c8",
    }.items()
}
"""Identifiers of the parts of a segment, a cluster and a block group (RFC 9559), and of paddings."""
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


def check_blocks(data: bytes, packets: int) -> None:
    """Raise InvalidVideo if parts of a WebM are damaged, or if it has more frames than FFmpeg found.

    FFmpeg skips what it cannot read, and computes later frames from others than the encoder did. An MP4 lists
    its frames in its header, so none of them can be skipped.

    packets: number of frames that FFmpeg found in the first video track.
    """
    frames: dict[int, int] = {}
    video = 0
    for number, (identifier, body, end) in enumerate(_tree(data)):
        if number == MAX_ELEMENTS:
            return
        if identifier == _TRACKS:
            tracks = [_track(data, *entry) for name, *entry in _children(data, body, end) if name == _TRACK]
            video = next((track for track, kind in tracks if kind == _VIDEO), 0)
            frames = {track: 0 for track, _ in tracks}
        elif identifier in _BLOCKS and frames:
            width, track = _number(data, body)
            if track not in frames:
                raise InvalidVideo(
                    f"the video is damaged at byte {body} of {len(data)}: a frame of track {track}, which "
                    f"its header does not list; {UNDAMAGED}",
                    code=DAMAGED,
                )
            laced = data[body + width + 2] & 0x06
            frames[track] += 1 + (data[body + width + 3] if laced else 0)
    if packets < frames.get(video, 0):
        raise InvalidVideo(
            f"the video is damaged: only {packets} of its {frames[video]} frames can be found; {UNDAMAGED}",
            code=DAMAGED,
        )


def _track(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Return number and type of a track, 0 if it does not state them."""
    values = {
        name: int.from_bytes(data[body:stop], "big") for name, body, stop in _children(data, start, end)
    }
    return values.get(_TRACK_NUMBER, 0), values.get(_TRACK_TYPE, 0)


def _children(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (identifier, start of body, end) of the parts of an element."""
    while at < end:
        width = 9 - data[at].bit_length()
        size_width, size = _number(data, at + width)
        body = at + width + size_width
        yield data[at : at + width], body, min(body + size, end)
        at = body + size


def _tree(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (identifier, start of body, end) of the elements of a WebM, up to the end of the segment.

    A segment or cluster of a live stream may state no size. Raises InvalidVideo for an unknown element, and
    for one that is longer than the element around it.
    """
    at = 0
    around = [(b"", len(data))]  # identifiers and ends of the elements around this place
    while at < around[0][1]:
        width = 9 - data[at].bit_length()
        identifier = data[at : at + width]
        size_width, size = _number(data, at + width)
        if around[-1][0] == _CLUSTER and identifier in _PARTS[_SEGMENT] - _PARTS[_CLUSTER]:
            around.pop()  # a cluster without a size ends where the next part of the segment begins
        parent, limit = around[-1]
        if identifier not in _PARTS[parent] or size_width > 8:
            raise InvalidVideo(
                f"the video is damaged at byte {at} of {len(data)}: no part that WebM allows begins here; "
                f"{UNDAMAGED}",
                code=DAMAGED,
            )
        body = at + width + size_width
        master = identifier in _PARTS
        end = limit if master and size == (1 << 7 * size_width) - 1 else body + size
        if end > limit:
            if limit == len(data):
                raise InvalidVideo(
                    f"the webm is truncated: its part at byte {at} ends after byte {end}, but it has only "
                    f"{len(data)} bytes; send the whole file",
                    code="video_truncated",
                )
            raise InvalidVideo(
                f"the video is damaged at byte {at} of {len(data)}: this part ends after the part around it; "
                f"{UNDAMAGED}",
                code=DAMAGED,
            )
        yield identifier, body, end
        if identifier == _SEGMENT:
            around = [(_SEGMENT, end)]
        elif master:
            around.append((identifier, end))
        at = body if master else end
        while len(around) > 1 and at == around[-1][1]:
            around.pop()


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return (width in bytes, value) of a number of variable width; (9, 0) if there is none."""
    if at >= len(data) or not data[at]:
        return 9, 0
    width = 9 - data[at].bit_length()
    return width, int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
