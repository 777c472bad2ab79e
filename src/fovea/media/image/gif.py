"""GIF (GIF89a): a screen descriptor, then blocks.

Pixels and extensions are chains of sub-blocks of up to 255 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from fovea.core.errors import InvalidImage
from fovea.media.image import base
from fovea.media.image.base import Facts, Format, IncompleteHeader, fragmentation_error, truncation_error

_EXTENSION, _FRAME, _TRAILER, _STRAY = 0x21, 0x2C, 0x3B, 0x00
_GRAPHIC_CONTROL = 0xF9

_MAX_SUB_BLOCKS = 250_000
"""Most sub-blocks of a file: 64 MB of full ones. They are cheaper than blocks, and there are more of them."""


class _Block(NamedTuple):
    """The block data[start:end]. label: of an extension; 0 for a frame."""

    kind: int
    label: int
    start: int
    end: int


def _matches(head: bytes) -> bool:
    return head[:6] in (b"GIF87a", b"GIF89a")


def _table(flags: int) -> int:
    """Return the size in bytes of the colour table that these flags announce."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def read_blocks(data: bytes) -> Iterator[_Block]:
    """Yield every complete block up to the trailer. Raises InvalidImage for too many parts.

    Empty blocks count, too: without sub-blocks, 20 MiB of single stray bytes took seconds.
    """
    at = 13 + _table(data[10])
    left = _MAX_SUB_BLOCKS
    for _ in range(base.MAX_PARTS):
        if at >= len(data):
            return
        kind = data[at]
        if kind == _TRAILER:
            yield _Block(kind, 0, at, at + 1)
            return
        body = _sub_blocks_at(data, at)
        if body is None:
            return
        end, left = _skip_sub_blocks(data, body, left)
        if end > len(data):
            return
        if kind != _STRAY:
            yield _Block(kind, data[at + 1] if kind == _EXTENSION else 0, at, end)
        at = end
    raise fragmentation_error("GIF")


def _sub_blocks_at(data: bytes, at: int) -> int | None:
    """Return where the sub-blocks of the block at `at` begin; None if the bytes end before."""
    kind = data[at]
    if kind == _STRAY:  # some writers add a second terminator: an empty chain of sub-blocks
        return at
    if kind == _EXTENSION:
        return at + 2 if at + 2 < len(data) else None
    if kind == _FRAME:
        if at + 10 > len(data):
            return None
        body = at + 10 + _table(data[at + 9]) + 1  # 1: the LZW code size
        return body if body < len(data) else None
    raise InvalidImage(f"the GIF is corrupt: no block begins with byte 0x{kind:02x}, found at {at}")


def _skip_sub_blocks(data: bytes, at: int, left: int) -> tuple[int, int]:
    """Return (position after the chain's terminator, sub-blocks that may still follow).

    The position is beyond the data if the terminator is missing. Raises InvalidImage for too many sub-blocks.
    """
    size = len(data)
    while at < size and data[at]:
        at += 1 + data[at]
        left -= 1
        if left <= 0:
            raise fragmentation_error("GIF", _MAX_SUB_BLOCKS)
    return at + 1, left


def _scan(data: bytes) -> Facts:
    if len(data) < 13:
        raise IncompleteHeader
    width, height = struct.unpack_from("<HH", data, 6)
    frames = 0
    for block in read_blocks(data):
        if block.kind != _FRAME:
            continue
        frames += 1
        if frames == 1:  # decoders enlarge the screen to hold the first frame
            left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, block.start + 1)
            width, height = max(width, left + frame_width), max(height, top + frame_height)
    return Facts(width, height, "P", max(1, frames))


def _essence(data: bytes) -> bytes:
    """Keep the screen descriptor, the first frame with its graphic control, and the trailer.

    Comments in particular are removed: Pillow joins their sub-blocks one by one, in quadratic time.
    """
    view = memoryview(data)
    control: bytes | memoryview = b""
    frame: bytes | memoryview = b""
    for block in read_blocks(data):
        if block.kind == _TRAILER and frame:
            return b"".join((view[: 13 + _table(data[10])], control, frame, b";"))
        if block.label == _GRAPHIC_CONTROL and not frame:
            control = view[block.start : block.end]
        if block.kind == _FRAME and not frame:
            frame = view[block.start : block.end]
    raise truncation_error("GIF", "its trailer" if frame else "the end of its first frame")


FORMAT = Format("GIF", "image/gif", _matches, _scan, _essence)
