"""Images of equal content have equal identities; images of different content have different ones."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageOps

from fovea.core.errors import InvalidImage
from fovea.core.media import content_identity
from fovea.media.image.decode import decode, from_array, from_pil
from fovea.media.limits import MediaLimits
from tests.media.samples import (
    animation,
    bmp,
    chunk,
    encode,
    exif,
    expect_error,
    picture,
    png,
    sample,
    with_jpeg_segment,
)

LIMITS = MediaLimits()


def test_identity_depends_on_the_bytes() -> None:
    one = decode(sample(), LIMITS)
    assert one.identity == decode(bytes(bytearray(sample())), LIMITS).identity
    assert one.identity == content_identity("image/png", 40, 30, sample())
    assert one.identity != decode(encode(picture(), "PNG", compress_level=1), LIMITS).identity
    assert len(one.identity) == 64


def test_pillow_and_array_agree() -> None:
    image = from_pil(picture())
    assert image == from_array(np.asarray(picture()))
    assert image.rgb == picture().tobytes()
    assert image.identity != from_pil(picture(41, 30)).identity
    transposed = picture().transpose(Pillow.Transpose.TRANSPOSE)
    assert from_pil(transposed).identity != image.identity


def test_equal_bytes_of_different_shapes_are_different_images() -> None:
    flat = np.zeros((4, 9, 3), np.uint8)
    assert from_array(flat).identity != from_array(flat.reshape(9, 4, 3)).identity


def test_pillow_modes_are_converted_like_files() -> None:
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "RGBX", "PA", "La", "RGBa"):
        base = picture(mode="LA").convert("La") if mode == "La" else None
        base = picture(mode="RGBA").convert("RGBa") if mode == "RGBa" else base
        image = from_pil(base or picture(mode=mode))
        assert (image.width, image.height) == (40, 30)
    clear = Pillow.new("RGBA", (2, 2), (9, 9, 9, 0))
    assert from_pil(clear).rgb == b"\xff" * 12
    deep = Pillow.fromarray(np.full((2, 2), 65535, np.uint16))
    assert from_pil(deep).rgb == b"\xff" * 12


def test_pillow_exif_is_applied() -> None:
    plain = picture()
    plain.info["exif"] = exif(6)
    assert from_pil(plain).width == 30


def test_grey_and_alpha_arrays() -> None:
    assert from_array(np.full((2, 3), 7, np.uint8)).rgb == b"\x07" * 18
    assert from_array(np.zeros((1, 1, 4), np.uint8)).rgb == b"\xff\xff\xff"
    assert from_array(np.asarray(picture())[::2, ::-1]).height == 15  # a view with strides


@pytest.mark.parametrize(
    ("array", "fragment"),
    [
        (np.zeros((4, 4, 3), np.float32), "dtype float32; accepted: uint8"),
        (np.zeros((4, 4, 2), np.uint8), "shape [4, 4, 2]"),
        (np.zeros((1, 4, 4, 3), np.uint8), "shape [1, 4, 4, 3]"),
        (np.zeros(4, np.uint8), "shape [4]"),
        (np.zeros((0, 4, 3), np.uint8), "4x0"),
        (np.zeros((1, 300, 3), np.uint8), "aspect ratio"),
    ],
)
def test_refused_arrays(array: np.ndarray, fragment: str) -> None:
    expect_error(from_array, InvalidImage, [fragment], array)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_refused_modes(mode: str) -> None:
    expect_error(from_pil, InvalidImage, [f"mode {mode}; accepted: 1, "], Pillow.new(mode, (2, 2)))


def xmp(orientation: int, element: bool = False) -> bytes:
    """An XMP document that states an orientation, as an attribute or as an element."""
    stated = b"<tiff:Orientation>%d</tiff:Orientation>" if element else b'tiff:Orientation="%d"/>'
    return b"<x:xmpmeta><rdf:Description " + stated % orientation + b"</x:xmpmeta>"


def text(name: bytes, keyword: bytes, value: bytes, *, packed: bool = False) -> bytes:
    """A text chunk of a PNG."""
    value = zlib.compress(value) if packed else value
    middle = {b"tEXt": b"", b"zTXt": b"\0", b"iTXt": bytes((packed, 0)) + b"en\0key\0"}[name]
    return chunk(name, keyword + b"\0" + middle + value)


def raw_profile(block: bytes) -> bytes:
    return b"\nexif\n%8d\n%b\n" % (len(block), block.hex().encode())


def turned_files() -> Iterator[tuple[str, bytes]]:
    """Files that state an orientation, by every way that writers use."""
    jpeg, plain = sample("JPEG"), sample("PNG")
    adobe = b"http://ns.adobe.com/xap/1.0/\0"
    for way in range(1, 10):
        yield f"JPEG XMP {way}", with_jpeg_segment(jpeg, 0xE1, adobe + xmp(way, element=way % 2 == 0))
    yield (
        "JPEG EXIF before XMP",
        with_jpeg_segment(with_jpeg_segment(jpeg, 0xE1, adobe + xmp(3)), 0xE1, exif(6)),
    )
    yield (
        "JPEG EXIF 1, XMP 6",
        with_jpeg_segment(with_jpeg_segment(jpeg, 0xE1, exif(1)), 0xE1, adobe + xmp(6)),
    )
    other_tag = exif(6).replace(b"\x01\x12", b"\x01\x0f")
    yield (
        "JPEG EXIF without the tag, XMP 8",
        with_jpeg_segment(with_jpeg_segment(jpeg, 0xE1, adobe + xmp(8)), 0xE1, other_tag),
    )
    yield "JPEG EXIF twice", with_jpeg_segment(with_jpeg_segment(jpeg, 0xE1, exif(3)), 0xE1, exif(8))
    yield (
        "JPEG EXIF of bytes",
        with_jpeg_segment(jpeg, 0xE1, exif(6, "<").replace(b"\x12\x01\x03", b"\x12\x01\x01")),
    )
    for name, extra in {
        "eXIf": chunk(b"eXIf", exif(6)[6:]),
        "eXIf with its name": chunk(b"eXIf", exif(6)),
        "iTXt": text(b"iTXt", b"XML:com.adobe.xmp", xmp(6)),
        "iTXt packed": text(b"iTXt", b"XML:com.adobe.xmp", xmp(5), packed=True),
        "tEXt XMP": text(b"tEXt", b"XML:com.adobe.xmp", xmp(8)),
        "raw profile": text(b"tEXt", b"Raw profile type exif", raw_profile(exif(6))),
        "raw profile packed": text(b"zTXt", b"Raw profile type exif", raw_profile(exif(7)), packed=True),
        "raw profile and eXIf": chunk(b"eXIf", exif(3)[6:])
        + text(b"tEXt", b"Raw profile type exif", raw_profile(exif(6))),
        "another text": text(b"tEXt", b"Comment", xmp(6)),
    }.items():
        yield f"PNG {name}", plain[:33] + extra + plain[33:]
        yield f"PNG {name} at the end", plain[:-12] + extra + plain[-12:]
    yield "WebP XMP", encode(picture(), "WEBP", lossless=True, xmp=xmp(6))
    yield "WebP both", encode(picture(), "WEBP", lossless=True, xmp=xmp(6), exif=exif(8))


def coloured_files() -> Iterator[tuple[str, bytes]]:
    """Files of all formats and colours."""
    alpha = picture(mode="RGBA")
    alpha.putalpha(Pillow.linear_gradient("L").resize(alpha.size))
    colours = picture().quantize(7)
    for kind, modes in {
        "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
        "JPEG": ("L", "RGB", "CMYK"),
        "WEBP": ("RGB", "RGBA"),
        "GIF": ("L", "P"),
        "BMP": ("1", "L", "P", "RGB"),
    }.items():
        for mode in modes:
            yield f"{kind} {mode}", encode(picture(mode=mode), kind, icc_profile=b"no profile")
    yield "PNG with alpha", encode(alpha, "PNG")
    yield "WebP with alpha", encode(alpha, "WEBP", lossless=True)
    yield "GIF with a transparent colour", encode(colours, "GIF", transparency=3)
    yield "PNG palette with a transparent colour", encode(colours, "PNG", transparency=3)
    yield "PNG palette with alphas", encode(colours, "PNG", transparency=bytes(range(0, 210, 30)))
    yield (
        "PNG 16-bit grey",
        encode(Pillow.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50), "PNG"),
    )
    yield "an MPO", encode(picture(), "MPO", save_all=True, append_images=[picture(20, 20)])
    for kind in ("GIF", "PNG", "WEBP"):
        yield f"an animated {kind}", animation(kind)
    for depth, colour, key in (
        (2, 0, (1,)),
        (4, 0, (3,)),
        (8, 0, (17,)),
        (16, 0, (0x0305,)),
        (16, 2, (0x0905,) * 3),
    ):
        samples = 3 if colour == 2 else 1
        values = [(row * 3 + place) % min(1 << depth, 9) for row in range(4) for place in range(8 * samples)]
        words = [value << 8 | 5 for value in values] if depth == 16 else values
        bits = "".join(f"{word:0{depth}b}" for word in words)
        line = len(bits) // 4
        rows = b"".join(
            b"\0" + int(bits[at : at + line], 2).to_bytes(line // 8, "big")
            for at in range(0, len(bits), line)
        )
        extra = chunk(b"tRNS", struct.pack(f">{samples}H", *key))
        yield (
            f"PNG {depth}-bit colour {colour} with a key",
            png(8, 4, rows, depth=depth, colour=colour, extra=extra),
        )
    for alphas in ("none", "some", "all"):
        yield f"BMP with {alphas} of its alpha", bmp(alphas)


FILES = [*turned_files(), *coloured_files()]


@pytest.mark.parametrize(("name", "data"), FILES, ids=[name for name, _ in FILES])
def test_a_file_and_its_pillow_image_are_the_same(name: str, data: bytes) -> None:
    """A photo whose XMP turns it was upright as a Pillow image and lay on its side as a file.

    Opaque pixels are those of transformers' `load_image`.
    """
    file = decode(data, MediaLimits(first_frame_of_animation=True))
    opened = from_pil(Pillow.open(io.BytesIO(data)))
    assert (opened.identity, opened.width, opened.height) == (file.identity, file.width, file.height)
    assert opened.rgb == file.rgb
    loaded = Pillow.open(io.BytesIO(data))
    loaded.load()
    again = from_pil(loaded)
    assert (again.width, again.height, again.rgb) == (file.width, file.height, file.rgb)
    reference = ImageOps.exif_transpose(Pillow.open(io.BytesIO(data)))
    assert reference.size == (file.width, file.height)
    if "16-bit" in name:  # Pillow's own conversion makes 16-bit grey white
        return
    expected = np.asarray(reference.convert("RGBA"))
    got = np.frombuffer(file.rgb, np.uint8).reshape(file.height, file.width, 3)
    opaque = expected[..., 3] == 255
    if "2-bit" in name or "4-bit" in name:  # Pillow compares widened pixels with the key as it is stored
        opaque = (got < 255).any(axis=2)
    assert np.array_equal(expected[opaque][:, :3], got[opaque])


def test_a_loaded_pillow_image_with_damaged_exif_is_upright() -> None:
    """Pillow raises a SyntaxError where viewers, and `decode`, ignore the damaged block."""
    data = encode(picture(), "WEBP", lossless=True, exif=b"no TIFF header")
    loaded = Pillow.open(io.BytesIO(data))
    loaded.load()
    assert from_pil(loaded).rgb == decode(data, LIMITS).rgb == picture().tobytes()


def test_a_changed_pillow_image_is_not_read_from_its_file() -> None:
    """Only an untouched image is decoded as its file: a caller's changes are part of the picture."""
    turned = with_jpeg_segment(sample("JPEG"), 0xE1, exif(6))
    for change in ("info", "draft", "exif", "drawn"):
        image = Pillow.open(io.BytesIO(turned))
        if change == "info":
            del image.info["exif"]
        elif change == "draft":
            image.draft("L", (20, 15))
        elif change == "exif":
            image.getexif()[0x0112] = 1
        else:
            image.paste((255, 0, 0), (0, 0, 40, 30))
        result = from_pil(image)
        assert result.identity != decode(turned, LIMITS).identity, change
        assert (result.width, result.height) == {"draft": (15, 20), "exif": (40, 30)}.get(change, (30, 40))
    second = Pillow.open(io.BytesIO(animation("GIF")))
    second.seek(1)
    assert from_pil(second).rgb != from_pil(Pillow.open(io.BytesIO(animation("GIF")))).rgb


def test_an_image_in_a_format_that_only_pillow_reads() -> None:
    """An icon or Targa file whose alpha is 0 everywhere has no alpha; a TIFF's orientation is applied."""
    clear = picture(mode="RGBA")
    clear.putalpha(0)
    for kind in ("TGA", "ICO"):
        data = encode(clear, kind, **({"bitmap_format": "bmp", "sizes": [(40, 30)]} if kind == "ICO" else {}))
        assert from_pil(Pillow.open(io.BytesIO(data))).rgb == picture().tobytes(), kind
    assert from_pil(clear).rgb == b"\xff" * 3600  # pixels alone: their alpha counts
    tiff = encode(picture(), "TIFF", exif=Pillow.Exif())
    assert from_pil(Pillow.open(io.BytesIO(tiff))).rgb == picture().tobytes()
