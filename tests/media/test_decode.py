"""Decoded pixels equal Pillow's own RGB where that is right, and an incomplete picture is refused."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageFile, ImageOps

from fovea.core.errors import InvalidImage
from fovea.core.media import Image
from fovea.media.image.decode import decode
from fovea.media.limits import MediaLimits
from tests.media.samples import (
    FORMATS,
    animation,
    bmp,
    chunk,
    encode,
    exif,
    expect_error,
    jpeg_segments,
    picture,
    png,
    png_header,
    sample,
    with_jpeg_segment,
)

LIMITS = MediaLimits()


def pixels(image: Image) -> np.ndarray:
    return np.frombuffer(image.rgb, np.uint8).reshape(image.height, image.width, 3)


def by_pillow(data: bytes) -> np.ndarray:
    with Pillow.open(io.BytesIO(data)) as file:
        return np.asarray(ImageOps.exif_transpose(file).convert("RGB"))


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("PNG", "RGB", {}),
        ("PNG", "L", {}),
        ("PNG", "1", {}),
        ("PNG", "P", {}),
        ("PNG", "P", {"bits": 2}),
        ("JPEG", "RGB", {}),
        ("JPEG", "RGB", {"progressive": True}),
        ("JPEG", "RGB", {"subsampling": 0}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGB", {"lossless": True}),
        ("GIF", "P", {}),
        ("GIF", "L", {"interlace": 0}),
        ("BMP", "RGB", {}),
        ("BMP", "P", {}),
        ("BMP", "1", {}),
    ],
)
def test_equals_pillow(kind: str, mode: str, options: dict[str, object]) -> None:
    data = encode(picture(mode=mode), kind, **options)
    assert np.array_equal(pixels(decode(data, LIMITS)), by_pillow(data))


def test_adobe_cmyk_jpeg_keeps_its_marker() -> None:
    data = encode(picture(mode="CMYK"), "JPEG")
    assert b"Adobe" in data
    difference = np.abs(pixels(decode(data, LIMITS)).astype(int) - np.asarray(picture(), int)).mean()
    assert difference < 12  # with inverted inks it would be about 100


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_equals_pillows(orientation: int) -> None:
    data = with_jpeg_segment(sample("JPEG"), 0xE1, exif(orientation))
    image = decode(data, LIMITS)
    assert (image.width, image.height) == ((40, 30) if orientation < 5 else (30, 40))
    assert np.array_equal(pixels(image), by_pillow(data))
    webp = encode(picture(), "WEBP", exif=exif(orientation), lossless=True)
    assert np.array_equal(pixels(decode(webp, LIMITS)), by_pillow(webp))


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "RGBA"), ("PNG", "LA"), ("WEBP", "RGBA")])
def test_an_opaque_alpha_channel_changes_nothing(kind: str, mode: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(picture(mode=mode), kind, **options)
    assert np.array_equal(pixels(decode(data, LIMITS)), by_pillow(data))


def test_alpha_is_composited_over_white() -> None:
    source = Pillow.new("RGBA", (3, 1))
    source.putdata([(0, 0, 0, 0), (200, 0, 0, 255), (0, 0, 0, 128)])
    clear, opaque, half = pixels(decode(encode(source, "PNG"), LIMITS))[0].tolist()
    assert clear == [255, 255, 255]
    assert opaque == [200, 0, 0]
    assert half == [127, 127, 127]


@pytest.mark.parametrize("top_down", [False, True])
@pytest.mark.parametrize(("header", "masks"), [(40, False), (40, True), (52, True), (56, True), (108, True),
                                               (124, True), (108, False), (124, False)])  # fmt: skip
def test_a_bmp_whose_alpha_is_empty_is_opaque(header: int, masks: bool, top_down: bool) -> None:
    """The Windows clipboard announces an alpha channel and leaves it 0: the picture became white."""
    data = bmp("none", header, masks=masks, top_down=top_down)
    assert np.array_equal(pixels(decode(data, LIMITS)), np.asarray(picture()))


def test_the_alpha_of_a_bmp_counts_if_any_pixel_is_visible() -> None:
    rgb = pixels(decode(bmp("some"), LIMITS)).copy()
    assert np.array_equal(rgb[5, 7], np.asarray(picture())[5, 7])
    rgb[5, 7] = 255
    assert (rgb == 255).all()
    assert np.array_equal(pixels(decode(bmp("all"), LIMITS)), np.asarray(picture()))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_a_clear_png_or_webp_is_white(kind: str) -> None:
    """In these formats an alpha channel means what it says."""
    clear = picture(mode="RGBA")
    clear.putalpha(0)
    assert (pixels(decode(encode(clear, kind), LIMITS)) == 255).all()


def test_grey_alpha_and_palette_transparency_over_white() -> None:
    grey = Pillow.new("LA", (2, 1))
    grey.putdata([(0, 0), (90, 255)])
    assert pixels(decode(encode(grey, "PNG"), LIMITS))[0].tolist() == [[255] * 3, [90] * 3]
    palette = Pillow.new("P", (2, 1))
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.putdata([0, 1])
    for kind, transparency in (("PNG", b"\x00\xff"), ("PNG", 0), ("GIF", 0)):
        data = encode(palette, kind, transparency=transparency)
        assert pixels(decode(data, LIMITS))[0].tolist() == [[255] * 3, [10, 20, 30]]


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    ramp = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    rgb = pixels(decode(encode(Pillow.fromarray(ramp), "PNG"), LIMITS))
    assert np.array_equal(rgb[..., 0].ravel(), np.arange(256))
    assert np.array_equal(rgb[..., 0], rgb[..., 2])


def test_sixteen_bit_grey_and_rgb_agree() -> None:
    values = (0, 300, 40_000, 65_535)
    grey = png(4, 1, b"\0" + struct.pack(">4H", *values), depth=16, colour=0)
    rgb = png(4, 1, b"\0" + b"".join(struct.pack(">3H", v, v, v) for v in values), depth=16, colour=2)
    assert decode(grey, LIMITS).rgb == decode(rgb, LIMITS).rgb


@pytest.mark.parametrize(
    ("depth", "colour", "key", "rows", "grey"),
    [
        (1, 0, [1], b"\0\x40", [0, 255]),  # the key is white before and after; the other pixel is black
        (2, 0, [1], b"\0\x60", [255, 170]),
        (4, 0, [3], b"\0\x3a", [255, 170]),
        (8, 0, [7], b"\0\x07\x08", [255, 8]),
        (16, 0, [0x0701], b"\0\x07\x01\x07\x02", [255, 7]),
        (8, 2, [5, 5, 5], b"\0\x05\x05\x05\x06\x06\x06", [255, 6]),
        (16, 2, [0x0500] * 3, b"\0" + b"\x05\x00" * 3 + b"\x06\x00" * 3, [255, 6]),
    ],
)
def test_transparent_colour(depth: int, colour: int, key: list[int], rows: bytes, grey: list[int]) -> None:
    trns = chunk(b"tRNS", struct.pack(f">{len(key)}H", *key))
    rgb = pixels(decode(png(2, 1, rows, depth=depth, colour=colour, extra=trns), LIMITS))
    assert rgb[0, :, 0].tolist() == grey


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_refused_unless_allowed(kind: str) -> None:
    data = animation(kind, frames=3)
    error = expect_error(
        decode, InvalidImage, ["animated with 3 frames", "accepted: a still image"], data, LIMITS
    )
    assert error.code == "image_animated"
    first = decode(data, MediaLimits(first_frame_of_animation=True))
    assert np.array_equal(pixels(first), by_pillow(data))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_truncation_is_refused(kind: str) -> None:
    data = sample(kind)  # 40 pixels of 3 bytes: BMP rows need no padding, so every byte counts
    for length in range(len(data)):
        with pytest.raises(InvalidImage):
            decode(data[:length], LIMITS)


@pytest.mark.parametrize("kind", FORMATS)
def test_trailing_bytes_do_not_matter(kind: str) -> None:
    data = sample(kind)
    assert decode(data + b"\xff\xda trailing" * 99, LIMITS).rgb == decode(data, LIMITS).rgb


def test_metadata_never_reaches_the_decoder() -> None:
    """A compressed text chunk, a broken colour profile and a second MPO picture do not change the pixels."""
    plain = sample("PNG")
    noisy = plain[:33] + chunk(b"zTXt", b"k\0\0broken") + chunk(b"iCCP", b"x\0\0nothing") + plain[33:]
    assert decode(noisy, LIMITS).rgb == decode(plain, LIMITS).rgb
    jpeg = sample("JPEG")
    for marker, body in (
        (0xE2, b"MPF\0broken"),
        (0xE2, b"ICC_PROFILE\0\x01\x05"),
        (0xFE, b"hello"),
        (0xED, b"8B"),
    ):
        assert decode(with_jpeg_segment(jpeg, marker, body), LIMITS).rgb == decode(jpeg, LIMITS).rgb
    gif = sample("GIF")
    assert decode(gif[:-1] + b"!\xfe\x05hello\0;", LIMITS).rgb == decode(gif, LIMITS).rgb


def test_a_phone_photo_with_a_second_picture_is_still() -> None:
    """An MPO file holds a second picture after the first. Pillow counts it as a second frame."""
    data = encode(picture(), "MPO", save_all=True, append_images=[picture()])
    with Pillow.open(io.BytesIO(data)) as file:
        assert getattr(file, "n_frames", 1) == 2
    assert decode(data, LIMITS).width == 40


def corrupt(data: bytes, at: int) -> bytes:
    return data[:at] + bytes((data[at] ^ 0x55,)) + data[at + 1 :]


JPEG = sample("JPEG")


@pytest.mark.parametrize(
    ("data", "fragment"),
    [
        (corrupt(sample(), sample().index(b"IDAT") + 20), "checksum of its IDAT chunk is wrong"),
        (png_header(64, 64), "the PNG cannot be decoded"),
        (png(4, 4, b"\x09" * 52), "the PNG cannot be decoded"),
        (png(4, 1, b"\0" * 5, colour=3), "palette colours but no palette"),
        (sample()[:-12], "it ends before its IEND chunk"),
        (JPEG[:-2], "it ends before its end-of-image marker"),
        (b"".join(part for part in jpeg_segments(JPEG) if part[1] != 0xDB), "the JPEG cannot be decoded"),
        (JPEG.replace(b"\xff\xc0", b"\xff\xc3", 1), "coded by method 3"),
        (JPEG[:-2] + jpeg_segments(JPEG)[-1][:12] * 200 + b"\xff\xd9", "more than 100 scans"),
        (sample("WEBP")[:-4], "the WebP is truncated"),
        (sample("WEBP")[:20] + b"\xf0\xff\xff" + sample("WEBP")[23:], "the WEBP cannot be decoded"),
        (sample("GIF")[:-1], "it ends before its trailer"),
        (sample("GIF")[:900], "it ends before the end of its first frame"),
        (sample("BMP")[:-1], "the BMP cannot be decoded"),
    ],
)
def test_refuses(data: bytes, fragment: str) -> None:
    expect_error(decode, InvalidImage, [fragment], data, LIMITS)


def test_a_second_header_cannot_change_the_size() -> None:
    parts = jpeg_segments(JPEG)
    frame = next(part for part in parts if part[1] == 0xC0)
    huge = frame[:5] + struct.pack(">HH", 3_000, 3_000) + frame[9:]
    data = b"".join([*parts[:-1], huge, parts[-1]])
    expect_error(decode, InvalidImage, ["more than one frame header"], data, LIMITS)
    data = png(4, 4, b"", extra=png_header(3_000, 3_000)[8:33])
    expect_error(decode, InvalidImage, ["contradicts itself about the size"], data, LIMITS)


def test_a_memory_error_becomes_invalid_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ImageFile.ImageFile, "load", no_memory)
    expect_error(decode, InvalidImage, ["not enough memory for its pixels"], sample(), LIMITS)


def test_pillow_still_refuses_truncated_images() -> None:
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
