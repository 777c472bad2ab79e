"""PNG: a signature, then chunks of length, name, body and CRC (W3C PNG, third edition)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from fovea.core.errors import InvalidImage
from fovea.media.image import base
from fovea.media.image.base import Facts, Format, IncompleteHeader, fragmentation_error, truncation_error

SIGNATURE = b"\x89PNG\r\n\x1a\n"

# (bit depth, colour type) -> Pillow's name of the mode
_MODES = {
    **{(depth, 0): "L" for depth in (2, 4, 8)},
    **{(depth, 3): "P" for depth in (1, 2, 4, 8)},
    (1, 0): "1", (16, 0): "I;16", (8, 2): "RGB", (16, 2): "RGB",
    (8, 4): "LA", (16, 4): "RGBA", (8, 6): "RGBA", (16, 6): "RGBA",
}  # fmt: skip
_TEXT_CHUNKS = frozenset((b"tEXt", b"zTXt", b"iTXt"))
_XMP, _RAW_EXIF = b"XML:com.adobe.xmp", b"Raw profile type exif"
_MAX_KEYWORD = 80
"""Bytes of the longest keyword of a text, and the 0 that ends it (PNG 11.3.3.2)."""
_ESSENTIAL_CHUNKS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))


def _matches(head: bytes) -> bool:
    return head.startswith(SIGNATURE)


def read_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, start of body, end of body) of every complete chunk. Data after IEND is ignored."""
    at = len(SIGNATURE)
    for _ in range(base.MAX_PARTS):
        if at + 12 > len(data):
            return
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if end + 4 > len(data):
            return
        yield name, at + 8, end
        if name == b"IEND":
            return
        at = end + 4
    raise fragmentation_error("PNG")


def _scan(data: bytes) -> Facts:
    if len(data) < 29:
        raise IncompleteHeader
    length, name, width, height, depth, colour = struct.unpack_from(">I4sIIBB", data, len(SIGNATURE))
    if name != b"IHDR" or length != 13:
        raise InvalidImage("the PNG is corrupt: its first chunk is not IHDR")
    mode = _MODES.get((depth, colour))
    if mode is None:
        raise InvalidImage(f"the PNG is corrupt: bit depth {depth} with colour type {colour} does not exist")
    frames, in_pixels = 1, False
    block: bytes | None = None
    texts: dict[bytes, tuple[bytes, int, int]] = {}
    for name, start, end in read_chunks(data):
        in_pixels = in_pixels or name == b"IDAT"
        # An acTL chunk after the first pixels is not an animation control (PNG 11.3.4.1).
        if name == b"acTL" and not in_pixels and end - start >= 4:
            frames = max(1, int.from_bytes(data[start : start + 4], "big"))
        elif name == b"eXIf" and block is None:  # a file has one at most (PNG 11.3.4.2)
            block = data[start : min(end, start + base.MAX_EXIF_BYTES)]
        elif name in _TEXT_CHUNKS:
            keyword = data[start : min(end, start + _MAX_KEYWORD)].partition(b"\0")[0]
            if keyword in (_XMP, _RAW_EXIF):  # of several, the last counts, as in Pillow
                texts[keyword] = (name, start + len(keyword) + 1, end)
    if block is None and _RAW_EXIF in texts:
        block = _raw_profile(_text(data, *texts[_RAW_EXIF]))
    xmp = _text(data, *texts[_XMP]) if _XMP in texts else b""
    return Facts(width, height, mode, frames, base.upright_by(block, xmp))


def _text(data: bytes, name: bytes, start: int, end: int) -> bytes:
    """Return the beginning of a text, inflated if need be; b"" if it is damaged. start: after its keyword."""
    body = data[start : min(end, start + base.MAX_XMP_BYTES)]
    compressed = name == b"zTXt"
    if name == b"iTXt":
        compressed = body[:1] == b"\1"
        # the compression method, then a language tag and a translated keyword, both ended by 0
        body = body[1:2] + b"".join(body[2:].split(b"\0", 2)[2:])
    if name == b"tEXt" or not compressed:
        return body if name == b"tEXt" else body[1:]
    try:
        return zlib.decompressobj().decompress(body[1:], base.MAX_XMP_BYTES)
    except zlib.error:
        return b""


def _raw_profile(text: bytes) -> bytes:
    """Return the EXIF block that ImageMagick wrote as a text: name, length, and hexadecimal digits."""
    digits = b"".join(text.split(b"\n")[3:])
    try:
        return bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        return b""


def _essence(data: bytes) -> bytes:
    """Keep the chunks of the still picture, and check the CRC of each: Pillow skips the CRC of IDAT."""
    view = memoryview(data)
    depth, colour = data[24], data[25]
    chunks: list[bytes | memoryview] = [SIGNATURE]
    palette = False
    for name, start, end in read_chunks(data):
        if name not in _ESSENTIAL_CHUNKS:
            continue
        palette = palette or name == b"PLTE"
        if zlib.crc32(view[start - 4 : end]) != int.from_bytes(view[end : end + 4], "big"):
            raise InvalidImage(
                f"the PNG is corrupt: the checksum of its {name.decode('latin-1')} chunk is wrong"
            )
        if name == b"tRNS" and colour in (0, 2):
            chunks.append(_chunk(name, _scaled_key(data[start:end], depth, colour)))
        else:
            chunks.append(view[start - 8 : end + 4])
        if name == b"IEND":
            if colour == 3 and not palette:  # Pillow would decode the indices as grey
                raise InvalidImage("the PNG is corrupt: it has palette colours but no palette")
            return b"".join(chunks)
    raise truncation_error("PNG", "its IEND chunk")


def _scaled_key(body: bytes, depth: int, colour: int) -> bytes:
    """Return the transparent colour in the units of the decoded pixels.

    Pillow widens 2-bit and 4-bit grey to 8 bits and narrows 16-bit RGB to 8 bits, but it compares the pixels
    with the key as it is stored. It leaves 16-bit grey unchanged, so its key stays unchanged, too.
    """
    channels = 1 if colour == 0 else 3
    if len(body) != 2 * channels:
        raise InvalidImage(
            f"the PNG is corrupt: its transparent colour has {len(body)} bytes; accepted: {2 * channels}"
        )
    if depth in (1, 8) or (depth == 16 and colour == 0):
        return body
    key = struct.unpack(f">{channels}H", body)
    most = (1 << depth) - 1
    scaled = [value >> 8 if depth == 16 else (value & most) * 255 // most for value in key]
    return struct.pack(f">{len(scaled)}H", *scaled)


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


FORMAT = Format("PNG", "image/png", _matches, _scan, _essence)
