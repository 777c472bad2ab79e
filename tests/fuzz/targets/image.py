"""Image files: the header, the bytes that a decoder gets, and the decoder itself."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image as Pillow

from fovea.media.image.decode import decode
from fovea.media.image.probe import format_of, peek, probe
from fovea.media.limits import MediaLimits
from tests.fuzz.refusals import note, refusals

LONGEST = 8192
WORDS = (
    b"\x89PNG\r\n\x1a\n", b"IHDR", b"IDAT", b"PLTE", b"tRNS", b"eXIf", b"acTL", b"fcTL", b"iCCP", b"IEND",
    b"\xff\xd8", b"\xff\xc0", b"\xff\xc2", b"\xff\xc4", b"\xff\xda", b"\xff\xdb", b"\xff\xdd", b"\xff\xd9",
    b"\xff\xff\xff", b"RIFF", b"WEBP", b"VP8 ", b"VP8L", b"VP8X", b"ANMF", b"EXIF", b"GIF87a", b"GIF89a",
    b"\x2c", b"\x21\xf9\x04", b"BM", b"Exif\0\0", b"II*\0", b"MM\0*", b"\0\0\0\0", b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff", b"\0\1", b"\xff\xff",
)  # fmt: skip
LIMITS = MediaLimits(max_pixels=250_000, max_side=4096, first_frame_of_animation=True)


def target(data: bytes) -> None:
    with refusals():
        peek(data[: len(data) // 2], LIMITS)
    with refusals():
        header = probe(data, LIMITS)
        note(f"{header.media_type} {header.mode} {header.orientation} {header.animated}")
        kind = format_of(data)
        assert kind is not None
        essence = kind.essence(data)
        assert len(essence) <= len(data) + 1024, "the decoder gets more bytes than the client sent"
    with refusals():
        image = decode(data, LIMITS)
        note("decoded")
        assert image.width * image.height <= LIMITS.max_pixels
        assert len(image.rgb) == 3 * image.width * image.height


def seeds() -> list[bytes]:
    picture = Pillow.radial_gradient("L").resize((20, 14)).convert("RGB")
    files = [
        *(_saved(picture, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")),
        _saved(picture, "JPEG", progressive=True), _saved(picture.convert("CMYK"), "JPEG"),
        _saved(picture, "WEBP", lossless=True), _saved(picture.convert("P"), "PNG", transparency=3),
        _saved(picture.convert("RGBA"), "PNG"), _saved(picture.convert("1"), "PNG"),
        _saved(picture.convert("I;16"), "PNG"), _saved(picture.convert("P"), "BMP"),
        _saved(picture.convert("1"), "BMP"),
        _saved(picture, "GIF", save_all=True, append_images=[picture.rotate(90)]),
        _saved(picture, "PNG", save_all=True, append_images=[picture.rotate(90)]),
        _saved(picture, "WEBP", save_all=True, append_images=[picture.rotate(90)]),
        _saved(picture, "JPEG", exif=_exif()), _saved(picture, "PNG", exif=_exif()),
        _saved(picture, "WEBP", exif=_exif()), scans(99),
        b"\xff\xd8" + b"\xff" * 4000 + _saved(picture, "JPEG")[2:], large_png(7071, 7071),
        large_png(1, 65535), large_png(0, 7), b"", b"<svg>", b"\0\0\0\x18ftypavif",
    ]  # fmt: skip
    return files


def _saved(picture: Pillow.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def _exif() -> Pillow.Exif:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    return exif


def scans(count: int) -> bytes:
    """A progressive JPEG of one block in which almost all scans change nothing."""

    def segment(marker: int, data: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data

    refine = segment(0xDA, b"\1\1\0\x01\x3f\x10") + b"\x7f"
    return b"".join(
        [
            b"\xff\xd8", segment(0xDB, b"\0" + b"\1" * 64),
            segment(0xC2, struct.pack(">BHHB", 8, 8, 8, 1) + b"\1\x11\0"),
            segment(0xC4, b"\0\1" + bytes(15) + b"\0"), segment(0xC4, b"\x10\1" + bytes(15) + b"\0"),
            segment(0xDA, b"\1\1\0\0\0\1") + b"\x7f", segment(0xDA, b"\1\1\0\x01\x3f\1") + b"\x7f",
            refine * (count - 2), b"\xff\xd9",
        ]
    )  # fmt: skip


def large_png(width: int, height: int) -> bytes:
    """A PNG that states a size and has the data of a few rows."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
