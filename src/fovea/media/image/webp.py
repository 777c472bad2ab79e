"""WebP: a RIFF file whose first chunk states the size of the canvas (RFC 9649)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from fovea.core.errors import InvalidImage
from fovea.media.image import base
from fovea.media.image.base import Facts, Format, IncompleteHeader, fragmentation_error, truncation_error

_ANIMATED, _ALPHA = 0x02, 0x10


def _matches(head: bytes) -> bool:
    return head[:4] == b"RIFF" and head[8:12] == b"WEBP"


def _size(data: bytes) -> int:
    """Return the size of the whole file in bytes, as its RIFF header states it."""
    return 8 + int.from_bytes(data[4:8], "little")


def read_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    at = 12
    last = min(len(data), _size(data))
    for _ in range(base.MAX_PARTS):
        if at + 8 > last:
            return
        name, length = struct.unpack_from("<4sI", data, at)
        end = at + 8 + length
        if end > last:
            return
        yield name, at + 8, end
        at = end + length % 2
    raise fragmentation_error("WebP")


def _scan(data: bytes) -> Facts:
    if len(data) < 30:
        raise IncompleteHeader
    width, height, mode, animated = _canvas(data)
    frames = 0
    block: bytes | None = None
    xmp: bytes | None = None
    for name, start, end in read_chunks(data):
        if name == b"ANMF":
            frames += 1
        elif name == b"EXIF" and block is None:  # further ones are ignored (RFC 9649, 2.7.1.5)
            block = data[start : min(end, start + base.MAX_EXIF_BYTES)]
        elif name == b"XMP " and xmp is None:
            xmp = data[start : min(end, start + base.MAX_XMP_BYTES)]
    if animated and len(data) < _size(data):
        frames = max(2, frames)  # a prefix of an animation: the frames are still to come
    upright = base.upright_by(block, xmp or b"")
    return Facts(width, height, mode, max(1, frames) if animated else 1, upright)


def _canvas(data: bytes) -> tuple[int, int, str, bool]:
    """Return (width, height, mode, whether the file is flagged as an animation)."""
    kind = data[12:16]
    if kind == b"VP8X":
        flags = data[20]
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        return width, height, "RGBA" if flags & _ALPHA else "RGB", bool(flags & _ANIMATED)
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), "RGBA" if bits >> 28 & 1 else "RGB", False
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF, "RGB", False
    raise InvalidImage("the WebP is corrupt: its first chunk holds no picture header")


def _essence(data: bytes) -> bytes:
    """Return the RIFF file unchanged: libwebp skips the chunks that it does not need."""
    if len(data) < _size(data):
        raise truncation_error("WebP", f"byte {_size(data)} that its header announces")
    return data[: _size(data)]


FORMAT = Format("WEBP", "image/webp", _matches, _scan, _essence)
