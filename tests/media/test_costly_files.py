"""Files of few bytes, or of many tiny parts, that once cost seconds: each is refused after bounded work.

No test measures time. They count: bytes and parts that are looked at, and samples that a decoder would visit.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fovea.core.errors import InvalidImage
from fovea.media.image import base, gif, jpeg, png, webp
from fovea.media.image.base import MAX_PARTS
from fovea.media.image.decode import decode
from fovea.media.image.probe import probe
from fovea.media.limits import MediaLimits
from tests.media.samples import chunk, encode, expect_error, picture, sample
from tests.media.samples import exif as exif_block
from tests.media.samples import png as png_file

LIMITS = MediaLimits()
SIZE = 4 << 20

SOS = b"\xff\xda\0\x0c\x03\x01\0\x02\0\x03\0\0\x3f\0"
EOI = b"\xff\xd9"


def frame(width: int, height: int, kind: int = 0xC2, factors: tuple[int, ...] = (0x11, 0x11, 0x11)) -> bytes:
    parts = b"".join(bytes((index + 1, factor, 0)) for index, factor in enumerate(factors))
    body = struct.pack(">BHHB", 8, height, width, len(factors)) + parts
    return bytes((0xFF, kind)) + struct.pack(">H", len(body) + 2) + body


def scan(*components: int) -> bytes:
    body = bytes((len(components), *(byte for id in components for byte in (id, 0)), 0, 63, 0))
    return b"\xff\xda" + struct.pack(">H", len(body) + 2) + body


def fill(head: bytes, part: bytes, tail: bytes = b"") -> bytes:
    """Return a file of SIZE bytes: `head`, then as many of `part` as there is room for, then `tail`."""
    return head + part * ((SIZE - len(head) - len(tail)) // len(part)) + tail


GIF = sample("GIF")[:-1]
PNG = sample()[:33]


def webp_file(chunks: bytes) -> bytes:
    """Return an animation of 16x16 pixels with these chunks."""
    start = b"WEBPVP8X" + struct.pack("<IB3x", 10, 2) + b"\x0f\0\0\x0f\0\0"
    return b"RIFF" + struct.pack("<I", len(start) + len(chunks)) + start + chunks


@pytest.mark.parametrize(
    ("data", "fragment"),
    [
        (fill(b"\xff\xd8", b"\xff"), "more than 1024 fill bytes at byte 2"),
        (fill(b"\xff\xd8" + frame(16, 16), b"\xff", SOS + EOI), "more than 1024 fill bytes"),
        (fill(b"\xff\xd8", b"\xff\xfe\0\x02"), "cut into more than 4000 parts"),
        (fill(b"\xff\xd8", b"\xff" * 1000 + b"\xff\xfe\0\x02"), "cut into more than 4000 parts"),
        (fill(b"\xff\xd8", b"\xff\x01"), "cut into more than 4000 parts"),
        (fill(PNG, chunk(b"teXt", b"")), f"cut into more than {MAX_PARTS} parts"),
        (fill(PNG, chunk(b"IDAT", b"")), f"cut into more than {MAX_PARTS} parts"),
        (fill(GIF + b"!\xfe", b"\x01a", b"\0;"), "cut into more than 250000 parts"),
        (fill(GIF, b"\0", b";"), f"cut into more than {MAX_PARTS} parts"),
        (fill(GIF, b"!\xfe\0", b";"), f"cut into more than {MAX_PARTS} parts"),
        (fill(GIF, b",\0\0\0\0\1\0\1\0\0\2\1\x00\0", b";"), f"cut into more than {MAX_PARTS} parts"),
        (webp_file(b"ABCD\0\0\0\0" * (SIZE // 8)), f"cut into more than {MAX_PARTS} parts"),
    ],
    ids=range(12),
)
def test_a_file_of_too_many_parts_is_refused(data: bytes, fragment: str) -> None:
    """Each part, fill byte or stray terminator was a turn of a Python loop: 20 MiB of 0xFF took 9 seconds.

    A GIF of empty blocks was not even counted, and took as long as it had bytes.
    """
    expect_error(probe, InvalidImage, [fragment], data, LIMITS)


@pytest.mark.parametrize(
    ("parts", "data", "most"),
    [
        (lambda data: jpeg.read_segments(data, scans=True), fill(b"\xff\xd8", b"\xff\x01"), 4_000),
        (png.read_chunks, fill(PNG, chunk(b"teXt", b"")), MAX_PARTS),
        (gif.read_blocks, fill(GIF, b"!\xfe\0", b";"), MAX_PARTS),
        (webp.read_chunks, webp_file(b"ABCD\0\0\0\0" * (SIZE // 8)), MAX_PARTS),
    ],
)
def test_the_loop_over_parts_ends(parts: Callable[[bytes], Iterator[object]], data: bytes, most: int) -> None:
    turns = itertools.count()
    with pytest.raises(InvalidImage, match="parts"):
        list(zip(parts(data), turns, strict=False))
    assert next(turns) <= most


def test_data_after_the_end_of_a_png_is_ignored() -> None:
    """Zeros after IEND looked like 350,000 chunks of an empty name, so that a padded file was refused."""
    data = sample()
    assert decode(data + bytes(SIZE), LIMITS).rgb == decode(data, LIMITS).rgb


def test_fill_bytes_before_a_marker_are_accepted() -> None:
    """The standard allows them (T.81, B.1.1.2), and some encoders write a few."""
    data = sample("JPEG")
    padded = data[:2] + b"\xff" * 1024 + data[2:-2] + b"\xff" * 7 + data[-2:]
    assert decode(padded, LIMITS).rgb == decode(data, LIMITS).rgb


def test_the_header_of_a_jpeg_does_not_search_its_pixels() -> None:
    """A check while a download arrives once searched megabytes of pixels for the end of the scan."""
    data = b"\xff\xd8" + frame(16, 16) + SOS + b"\xff\0" * 1000
    assert [part.end for part in jpeg.read_segments(data, scans=False)][-1] == len(data) - 2000


# ---- EXIF


def test_only_the_first_exif_block_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """26 blocks with 65,535 entries each took 0.2 seconds in a PNG or WebP of 20 MiB."""
    sizes: list[int] = []
    read = base.orientation

    def count(blob: bytes) -> int:
        sizes.append(len(blob))
        return read(blob)

    monkeypatch.setattr(base, "orientation", count)
    huge = b"MM\0*\0\0\0\x08\xff\xff" + bytes(12 * 65535)
    assert probe(png_file(2, 1, b"\0" + bytes(6), extra=chunk(b"eXIf", huge) * 3), LIMITS).orientation == 1
    body = b"EXIF" + struct.pack("<I", len(huge)) + huge
    assert probe(webp_file(body * 3), LIMITS).orientation == 1
    assert sizes == [base.MAX_EXIF_BYTES, base.MAX_EXIF_BYTES]
    both = chunk(b"eXIf", exif_block(6)[6:]) + chunk(b"eXIf", exif_block(3)[6:])
    assert probe(png_file(2, 1, b"\0" + bytes(6), extra=both), LIMITS).orientation == 6


def test_one_text_of_many_is_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    """An orientation can be in a compressed text of a PNG. Of each kind, the beginning of one is read."""
    sizes: list[int] = []
    inflate = png._text

    def count(*args: Any) -> bytes:
        text = inflate(*args)
        sizes.append(len(text))
        return text

    monkeypatch.setattr(png, "_text", count)
    packed = zlib.compress(bytes(4 * base.MAX_XMP_BYTES))
    bombs = [chunk(b"zTXt", name + b"\0\0" + packed) for name in (png._XMP, png._RAW_EXIF)]
    data = png_file(2, 1, b"\0" + bytes(6), extra=b"".join(bombs) * 100)
    assert probe(data, LIMITS).orientation == 1
    assert sizes == [base.MAX_XMP_BYTES, base.MAX_XMP_BYTES]


def test_an_orientation_beyond_the_largest_block_is_not_read() -> None:
    entries = bytes(12) * 10_000 + struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)
    assert base.orientation(b"MM\0*\0\0\0\x08" + struct.pack(">H", 10_001) + entries) == 1


@pytest.mark.parametrize(("colour", "size"), [(0, 6), (0, 1_000_001), (2, 2), (2, 10_000_000)])
def test_a_transparent_colour_of_a_wrong_length_is_refused(colour: int, size: int) -> None:
    """A tRNS chunk of 20 MiB was converted to a list of ten million numbers."""
    data = png_file(2, 1, b"", depth=16, colour=colour, extra=chunk(b"tRNS", bytes(size)))
    expect_error(
        decode, InvalidImage, [f"has {size} bytes; accepted: {2 if colour == 0 else 6}"], data, LIMITS
    )


# ---- scans of a JPEG


def test_a_small_file_with_many_scans_over_a_large_picture_is_refused() -> None:
    """0.2 MB of 99 scans over 50 megapixels cost 6 seconds of decoding."""
    data = (
        b"\xff\xd8" + frame(7071, 7071) + scan(1, 2, 3) + b"".join(scan(1 + n % 3) for n in range(98)) + EOI
    )
    error = expect_error(
        decode, InvalidImage, ["7071x7071", "849983697 samples", "at most 800000000"], data, LIMITS
    )
    assert error.code == "image_too_large"


def test_many_scans_over_a_small_picture_are_bounded_by_number() -> None:
    data = b"\xff\xd8" + frame(16, 16) + scan(1) * 101 + EOI
    expect_error(decode, InvalidImage, ["more than 100 scans"], data, LIMITS)


@pytest.mark.parametrize(
    ("factors", "scans", "visits"),
    [
        ((0x11,), [(1,)], 100),
        ((0x11, 0x11, 0x11), [(1, 2, 3)], 300),
        ((0x22, 0x11, 0x11), [(1, 2, 3)], 150),
        ((0x22, 0x11, 0x11), [(1,), (2,), (3,), (1, 2)], 275),
        ((0x11, 0x44, 0x11), [(1,)], 6),
        ((0x11, 0x11, 0x11), [(7,)], 0),
    ],
)
def test_visits_follow_from_the_components_of_a_scan(
    factors: tuple[int, ...], scans: list[tuple[int, ...]], visits: int
) -> None:
    header = jpeg.read_frame(0xC2, frame(10, 10, factors=factors)[4:])
    assert sum(header.visits(bytes(components)) for components in scans) == visits


@pytest.mark.parametrize("header", [b"", b"\x01", b"\x03\x01\x00", b"\xff" * 9])
def test_a_damaged_scan_header_is_an_error_of_the_file(header: bytes) -> None:
    cut = b"\xff\xd8" + frame(16, 16) + b"\xff\xda" + struct.pack(">H", 2 + len(header)) + header
    expect_error(jpeg.FORMAT.essence, InvalidImage, ["it ends before its end-of-image marker"], cut)
    expect_error(decode, InvalidImage, ["the JPEG"], cut + EOI, LIMITS)


def test_two_components_with_one_name_count_as_the_larger_one() -> None:
    body = struct.pack(">BHHB", 8, 10, 10, 3) + bytes((1, 0x44, 0, 1, 0x11, 0, 1, 0x11, 0))
    assert jpeg.read_frame(0xC2, body).visits(b"\x01") == 100


@pytest.mark.parametrize("subsampling", [0, 2])
def test_an_ordinary_progressive_file_of_the_largest_size_is_accepted(subsampling: int) -> None:
    """The scans of libjpeg's standard progression, over as many pixels as are accepted by default."""
    small = encode(picture(), "JPEG", progressive=True, subsampling=subsampling)
    at = small.index(b"\xff\xc2")
    large = small[: at + 5] + struct.pack(">HH", 7071, 7071) + small[at + 9 :]
    assert small.count(b"\xff\xda") == 10
    assert jpeg.FORMAT.essence(large).startswith(b"\xff\xd8")


@pytest.mark.parametrize("kind", [0xC3, 0xC5, 0xC9, 0xCA, 0xCF])
def test_unusual_codings_are_refused(kind: int) -> None:
    """Lossless, hierarchical and arithmetic coding: no browser shows them, so few files need them."""
    data = b"\xff\xd8" + frame(16, 16, kind) + SOS + EOI
    expect_error(
        probe, InvalidImage, [f"coded by method {kind - 0xC0}", "accepted: 0, 1 and 2"], data, LIMITS
    )
