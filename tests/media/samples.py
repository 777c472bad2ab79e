"""Real encoded pictures, generated in memory, and small builders for broken ones."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from fovea.core.errors import FoveaError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MEDIA_TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
}


def picture(width: int = 40, height: int = 30, mode: str = "RGB") -> Pillow.Image:
    """A picture that differs in every corner, so that every rotation and flip changes it."""
    x = np.linspace(0, 255, width, dtype=np.uint8)[None, :].repeat(height, 0)
    y = np.linspace(0, 255, height, dtype=np.uint8)[:, None].repeat(width, 1)
    return Pillow.fromarray(np.stack([x, y, 255 - x // 2 - y // 3], axis=2)).convert(mode)


def encode(image: Pillow.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def sample(kind: str = "PNG", width: int = 40, height: int = 30) -> bytes:
    return encode(picture(width, height), kind)


def animation(kind: str, frames: int = 3) -> bytes:
    stills = [Pillow.new("RGB", (24, 16), (80 * n, 255 - 80 * n, 40)) for n in range(frames)]
    return encode(stills[0], kind, save_all=True, append_images=stills[1:], duration=50)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(
    width: int, height: int, rows: bytes, *, depth: int = 8, colour: int = 2, extra: bytes = b""
) -> bytes:
    """A PNG from its raw rows, each with its filter byte; `extra` chunks go before the pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            extra,
            chunk(b"IDAT", zlib.compress(rows)),
            chunk(b"IEND", b""),
        )
    )


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has almost no pixels: the start of a decompression bomb."""
    return png(width, height, b"")


def bmp(alphas: str, header: int = 124, *, masks: bool = True, top_down: bool = False) -> bytes:
    """A BMP of `picture()` in 32 bits per pixel.

    alphas: "none": 0 everywhere; "some": 0 except for one opaque pixel; "all": opaque.
    header: bytes of the info header.
    masks: whether it is BI_BITFIELDS, which states an alpha channel, or BI_RGB.
    """
    pixels = np.asarray(picture(mode="RGBA"))[..., [2, 1, 0, 3]].copy()
    pixels[..., 3] = 255 if alphas == "all" else 0
    if alphas == "some":
        pixels[5, 7, 3] = 255
    rows = (pixels if top_down else pixels[::-1]).tobytes()
    info = struct.pack("<IiiHHII", header, 40, -30 if top_down else 30, 1, 32, 3 if masks else 0, len(rows))
    info = info.ljust(40, b"\0") + struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    info = info.ljust(header, b"\0") if header > 40 else info[:52] if masks else info[:40]
    return b"BM" + struct.pack("<IHHI", 14 + len(info) + len(rows), 0, 0, 14 + len(info)) + info + rows


def jpeg_segments(data: bytes) -> list[bytes]:
    """Split a JPEG: [SOI, segment, segment, ..., the first start of scan with all that follows]."""
    parts, at = [data[:2]], 2
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        parts.append(data[at:end])
        at = end
    return [*parts, data[at:]]


def exif(orientation: int, order: str = ">") -> bytes:
    """An EXIF block that holds only an orientation."""
    byte_order = b"MM" if order == ">" else b"II"
    entry = struct.pack(f"{order}HHIHH", 0x0112, 3, 1, orientation, 0)
    return b"Exif\0\0" + byte_order + struct.pack(f"{order}HIH", 42, 8, 1) + entry + bytes(4)


def with_jpeg_segment(data: bytes, marker: int, body: bytes) -> bytes:
    return data[:2] + bytes((0xFF, marker)) + struct.pack(">H", len(body) + 2) + body + data[2:]


def expect_error(
    call: Callable[..., object], kind: type[FoveaError], fragments: Sequence[str], *args: object
) -> FoveaError:
    """Return the error of `call`, which must have exactly this class and all fragments in its message."""
    with pytest.raises(kind) as caught:
        call(*args)
    assert type(caught.value) is kind
    for fragment in fragments:
        assert fragment in caught.value.message
    return caught.value
