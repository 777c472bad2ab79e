"""Headers are read correctly from real pictures, and every limit is enforced before a pixel is decoded."""

from __future__ import annotations

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from fovea.core.errors import InvalidImage
from fovea.media.image.probe import peek, probe
from fovea.media.limits import MediaLimits
from tests.media.samples import (
    FORMATS,
    MEDIA_TYPES,
    animation,
    chunk,
    encode,
    exif,
    expect_error,
    picture,
    png,
    png_header,
    sample,
    with_jpeg_segment,
)

LIMITS = MediaLimits()


@given(kind=st.sampled_from(FORMATS), width=st.integers(1, 70), height=st.integers(1, 70))
def test_the_header_agrees_with_pillow(kind: str, width: int, height: int) -> None:
    data = sample(kind, width, height)
    header = probe(data, LIMITS)
    with Pillow.open(io.BytesIO(data)) as file:
        assert (header.width, header.height) == file.size
    assert header.media_type == MEDIA_TYPES[kind]
    assert (header.animated, header.frames, header.orientation) == (False, 1, 1)
    assert header.pixels == width * height


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("1", "PNG"),
        ("L", "PNG"),
        ("LA", "PNG"),
        ("P", "PNG"),
        ("RGBA", "PNG"),
        ("I;16", "PNG"),
        ("L", "JPEG"),
        ("CMYK", "JPEG"),
        ("P", "GIF"),
        ("P", "BMP"),
    ],
)
def test_mode(mode: str, kind: str) -> None:
    assert (
        probe(encode(picture(mode="L" if mode == "I;16" else mode).convert(mode), kind), LIMITS).mode == mode
    )


@pytest.mark.parametrize("lossless", [True, False])
def test_webp_alpha(lossless: bool) -> None:
    clear = picture(mode="RGBA")
    clear.putalpha(90)
    assert probe(encode(clear, "WEBP", lossless=lossless), LIMITS).mode == "RGBA"


@pytest.mark.parametrize(("kind", "lossless"), [("VP8 ", False), ("VP8L", True)])
def test_simple_webp_without_extended_header(kind: str, lossless: bool) -> None:
    data = encode(picture(), "WEBP", lossless=lossless)
    assert data[12:16] == kind.encode()
    assert (probe(data, LIMITS).width, probe(data, LIMITS).height) == (40, 30)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_animations_are_detected(kind: str) -> None:
    header = probe(animation(kind, frames=3), LIMITS)
    assert header.animated
    assert header.frames == 3


def test_an_animation_is_detected_in_a_prefix() -> None:
    assert probe(animation("WEBP")[:40], LIMITS).animated
    assert probe(animation("PNG")[:80], LIMITS).animated


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_exchanges_width_and_height(orientation: int, order: str) -> None:
    jpeg = with_jpeg_segment(sample("JPEG"), 0xE1, exif(orientation, order))
    png_file = png(2, 1, b"\0" + bytes(6), extra=chunk(b"eXIf", exif(orientation, order)[6:]))
    assert probe(jpeg, LIMITS).orientation == orientation
    assert (probe(jpeg, LIMITS).width > probe(jpeg, LIMITS).height) == (orientation < 5)
    assert probe(png_file, LIMITS).orientation == orientation


@pytest.mark.parametrize(
    "block",
    [
        b"Exif\0\0",
        b"Exif\0\0MM\0*",
        b"Exif\0\0XX\0*\0\0\0\x08\0\x01",
        exif(9),
        exif(0),
        exif(6)[:-10],
        b"Exif\0\0MM\0*\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
    ],
)
def test_unreadable_exif_is_upright(block: bytes) -> None:
    assert probe(with_jpeg_segment(sample("JPEG"), 0xE1, block), LIMITS).orientation == 1


@pytest.mark.parametrize("kind", FORMATS)
def test_peek_waits_for_the_header_and_then_agrees(kind: str) -> None:
    data = sample(kind)
    headers = [peek(data[:length], LIMITS) for length in range(2, len(data) + 1) if length >= 16]
    first = next(index for index, header in enumerate(headers) if header)
    assert first < len(headers) - 1
    assert all(header is None for header in headers[:first])
    assert {(header.width, header.height) for header in headers[first:] if header} == {(40, 30)}
    assert None not in headers[first:]


BMP = sample("BMP")
GIF = sample("GIF")


@pytest.mark.parametrize(
    ("data", "fragments"),
    [
        (b"", ["the data is empty", "accepted: PNG, JPEG, WebP, GIF, BMP"]),
        (b"  <!DOCTYPE html><html>no such picture</html>", ["an HTML page", "accepted: PNG"]),
        (b"\xef\xbb\xbf<html lang=en>", ["an HTML page"]),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', ["an SVG drawing"]),
        (b'<?xml version="1.0"?><Error>AccessDenied</Error>', ["an XML document"]),
        (b'{"error": "not found"}', ["JSON text"]),
        (b"%PDF-1.7\n%\xe2\xe3", ["a PDF document"]),
        (b"PK\x03\x04\x14\0\0\0", ["a ZIP archive"]),
        (b"\x1f\x8b\x08\0\0\0", ["gzip"]),
        (b"II*\0\x08\0\0\0", ["a TIFF image; convert it to PNG"]),
        (b"\0\0\0\x18ftypheic\0\0", ["a HEIC image"]),
        (b"\0\0\0\x18ftypavif\0\0", ["an AVIF image"]),
        (b"\0\0\0\x18ftypisom\0\0", ["an MP4 or QuickTime video"]),
        (b"version https://git-lfs.github.com/spec/v1\noid", ["a Git LFS pointer"]),
        (b"just some words", ["plain text"]),
        (b"\x01\x02\x03\xff\xfe", ["0x010203fffe"]),
        (sample("PNG")[:20], ["the PNG is truncated: it ends within its header"]),
        (sample("JPEG")[:40], ["the JPEG is truncated"]),
        (sample("WEBP")[:20], ["the WEBP is truncated"]),
        (GIF[:10], ["the GIF is truncated"]),
        (BMP[:30], ["the BMP is truncated"]),
        (png_header(0, 10), ["0x10", "at least 1"]),
        (png_header(20_000, 10), ["20000x10", "at most 16384 on a side"]),
        (png_header(2**31 - 1, 2**31 - 1), ["at most 16384"]),
        (png_header(16_000, 16_000), ["256000000 in all", "at most 50000000"]),
        (png_header(10_000, 10), ["an aspect ratio of at most 200:1"]),
        (png(1, 1, b"", depth=3), ["bit depth 3 with colour type 2 does not exist"]),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), ["its first chunk is not IHDR"]),
        (b"\xff\xd8\xff\xd9" + bytes(20), ["its pixels come before its frame header"]),
        (b"\xff\xd8\xff\xe0\0\x04abXX" + bytes(20), ["no marker at byte 8"]),
        (b"\xff\xd8\xff\xe0\0\x01" + bytes(20), ["a segment of length 1"]),
        (b"\xff\xd8\xff\xc0\0\x0b\x0c\0\x10\0\x10\x03" + bytes(20), ["12 bits per sample; accepted: 8"]),
        (b"\xff\xd8\xff\xc0\0\x0b\x08\0\x10\0\x10\x02" + bytes(20), ["2 colour components"]),
        (b"\xff\xd8\xff\xc0\0\x0b\x08\0\0\0\x10\x01\x01\x11\0", ["16x0"]),
        (b"\xff\xd8\xff\xc0\0\x0b\x08\0\x10\0\x10\x03\x01\x11\0", ["its frame header is too short"]),
        (b"\xff\xd8\xff\xc0\0\x0b\x08\0\x10\0\x10\x01\x01\x15\0", ["sampling factors 1x5"]),
        (b"\xff\xd8\xff\xc0\0\x0b\x08\0\x10\0\x10\x01\x01\x01\0", ["sampling factors 0x1"]),
        (b"RIFF\xff\0\0\0WEBPABCD" + bytes(20), ["holds no picture header"]),
        (b"RIFF\xff\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff", ["16777216x16777216"]),
        (b"GIF89a\0\0\0\0\0\0\0;" + bytes(20), ["0x0"]),
        (GIF[:13] + b"\xff" * 5000, ["the GIF is corrupt: no block begins with byte"]),
        (BMP[:28] + struct.pack("<H", 7) + BMP[30:], ["7 bits per pixel"]),
        (BMP[:30] + struct.pack("<I", 1) + BMP[34:], ["compressed (kind 1)"]),
        (BMP[:18] + struct.pack("<i", -5) + BMP[22:], ["0x30"]),
    ],
)
def test_refuses(data: bytes, fragments: list[str]) -> None:
    expect_error(probe, InvalidImage, fragments, data, LIMITS)


def test_min_side() -> None:
    expect_error(probe, InvalidImage, ["at least 32 on each side"], sample(), MediaLimits(min_side=32))


def test_a_gif_screen_is_enlarged_to_its_first_frame() -> None:
    data = bytearray(GIF)
    data[6:10] = struct.pack("<HH", 1, 1)
    assert (probe(bytes(data), LIMITS).width, probe(bytes(data), LIMITS).height) == (40, 30)
