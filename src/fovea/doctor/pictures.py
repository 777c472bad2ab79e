"""PNG files in one colour, and a decompression bomb."""

from __future__ import annotations

import base64
import struct
import zlib


def png(width: int, height: int, colour: tuple[int, int, int] = (40, 90, 200)) -> bytes:
    """Return a picture in one colour."""
    row = b"\0" + bytes(colour) * width
    return _file(width, height, zlib.compress(row * height, 9))


def bomb(side: int = 50_000) -> bytes:
    """Return a small file that says it is a square of `side` pixels, and holds a part of these pixels."""
    return _file(side, side, zlib.compress(bytes(1 << 22), 9))


def data_url(picture: bytes) -> str:
    """Return a picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _file(width: int, height: int, pixels: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
