"""Images of equal content have equal identities; images of different content have different ones."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image as Pillow

from fovea.core.errors import InvalidImage
from fovea.core.image import content_identity
from fovea.media.image.decode import decode
from fovea.media.image.identity import from_array, from_pil
from fovea.media.limits import MediaLimits
from tests.media.samples import encode, exif, expect_error, picture, sample

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
