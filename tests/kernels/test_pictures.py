"""The C++ kernels for pictures against Pillow and numpy: the same bytes and the same values."""

from __future__ import annotations

import ctypes
import platform

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from PIL.Image import Resampling

from fovea.engine.vision.processor.pixels import Palette, resize_with_pillow
from fovea.engine.vision.processor.settings import Settings
from fovea.kernels.native import pictures
from fovea.kernels.native.pictures import Order
from tests.support.thorough import examples

pytestmark = pytest.mark.kernels

FILTERS = (Resampling.BOX, Resampling.BILINEAR, Resampling.BICUBIC, Resampling.LANCZOS)
PALETTE = Palette.read(Settings({}))
TYPES = ("float32", "float16", "bfloat16")
SIDES = st.one_of(st.integers(1, 20), st.integers(1, 300))


@pytest.fixture(scope="module", autouse=True)
def native(lib: ctypes.CDLL) -> object:
    """Let `pictures` use the kernels of an instruction set."""
    for name, signature in pictures.SIGNATURES.items():
        getattr(lib, name).argtypes, getattr(lib, name).restype = signature, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "kernels", lambda: lib)
        yield


def draw(seed: int, height: int, width: int) -> np.ndarray:
    """Return noise, or hard edges, which make the bicubic sums leave the range of a byte."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return np.where(pixels > 127, 255, 0).astype(np.uint8) if seed % 2 else pixels


@settings(max_examples=examples(600), deadline=None)
@given(SIDES, SIDES, SIDES, SIDES, st.sampled_from(FILTERS), st.integers(0, 9))
def test_a_resize_returns_the_bytes_of_pillow(height, width, new_height, new_width, resample, seed):
    pixels = draw(seed, height, width)
    ours = pictures.resize(pixels, new_height, new_width, resample)
    assert ours is not None
    theirs = resize_with_pillow(pixels, new_height, new_width, resample)
    # Compilers for other processors join a product and a sum in Pillow's weights.
    allowed = 0 if platform.machine() == "x86_64" else 1
    assert int(np.abs(ours.astype(int) - theirs).max()) <= allowed


@pytest.mark.parametrize("resample", FILTERS, ids=lambda resample: resample.name)
def test_sides_that_are_no_multiple_of_a_vector_or_a_strip(resample):
    for size, new in (
        ((1650, 1275), (1652, 1288)),
        ((16, 16), (16, 17)),
        ((17, 513), (33, 257)),
        ((2, 4000), (3, 7)),
        ((4000, 2), (5, 3)),
        ((3, 5), (300, 400)),
        ((300, 200), (28, 28)),
        ((40, 40), (40, 80)),
        ((40, 40), (80, 40)),
    ):
        pixels = draw(1, *size)
        ours = pictures.resize(pixels, *new, resample)
        assert np.array_equal(ours, resize_with_pillow(pixels, *new, resample)), (size, new)


@pytest.mark.parametrize("columns", [False, True])
def test_the_order_of_rows_and_columns_is_that_of_the_installed_pillow(columns, monkeypatch):
    """On a machine with Pillow 12.3, Qwen2-VL's pixels differed from transformers' by 22 of 255.

    Pillow resizes columns first since 13.0, if that is less work. Two resizes of Pillow have a known order.
    """
    monkeypatch.setattr(pictures, "COLUMNS_MAY_COME_FIRST", columns)
    pixels, cubic = draw(0, 90, 130), Resampling.BICUBIC
    between = (84, 130) if columns else (90, 140)
    theirs = resize_with_pillow(resize_with_pillow(pixels, *between, cubic), 84, 140, cubic)
    assert np.array_equal(pictures.resize(pixels, 84, 140, cubic), theirs)


def test_pillow_remains_for_what_the_kernels_cannot_do():
    pixels = draw(0, 30, 20)
    assert pictures.resize(pixels, 10, 10, Resampling.NEAREST) is None
    assert pictures.resize(pixels, 10, 10, Resampling.HAMMING) is None
    assert pictures.resize(draw(0, 1, 2001), 1, 2, Resampling.BOX) is None


@settings(max_examples=examples(120), deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.booleans(), st.sampled_from(TYPES), st.integers(0, 9))
def test_patches_equal_those_of_numpy(height, width, channels_last, name, seed):
    rng = np.random.default_rng(seed)
    pixels = draw(seed, height + 30, width + 30)[:, 3 : width + 20]
    room = np.array(pixels.shape[:2]) - (height, width) + 1
    order = Order(rng.integers(0, room, (7, 2)), height, width, channels_last)
    palette, shape = (
        PALETTE.in_type(name),
        (7, height * width, 3) if channels_last else (7, 3, height * width),
    )
    ours, theirs = (np.zeros(shape, palette.table.dtype) for _ in range(2))
    assert pictures.cut(pixels, order, palette.table, ours)
    palette.cut_slowly(pixels, order, theirs)
    assert np.array_equal(ours, theirs)


def test_patches_of_frames_lie_between_each_other():
    order = Order(np.array([[0, 0], [4, 4]]), 4, 4)
    ours, theirs = (np.zeros((2, 3, 2, 16), np.float32) for _ in range(2))
    for time in range(2):
        pixels = draw(time, 8, 8)
        assert pictures.cut(pixels, order, PALETTE.table, ours[:, :, time])
        PALETTE.cut_slowly(pixels, order, theirs[:, :, time])
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": Order(np.array([[5, 0]]), 4, 4)}, "outside of its picture"),
        ({"order": Order(np.array([[-1, 0]]), 4, 4)}, "outside of its picture"),
        ({"order": Order(np.array([[0, 0]], np.int32), 4, 4)}, "pairs of int64"),
        ({"pixels": np.zeros((8, 8, 4), np.uint8)}, "pixels of 3 bytes"),
        ({"pixels": np.zeros((8, 8, 3), np.uint8).transpose(1, 0, 2)}, "pixels of 3 bytes"),
        ({"pixels": np.zeros((8, 8, 3), np.uint8)[::-1]}, "pixels of 3 bytes"),
        ({"table": np.zeros((3, 255), np.float32)}, "256 values"),
        ({"table": np.zeros((3, 256), np.float64), "out": np.zeros((1, 3, 16))}, "2 or 4 bytes"),
        ({"out": np.zeros((1, 3, 15), np.float32)}, r"patches must be \[1, 3, 16\]"),
        ({"out": np.zeros((1, 3, 16), np.uint32)}, "patches must be"),
        ({"out": np.zeros((1, 3, 16), np.float32)[:, ::-1]}, "patches must be"),
        ({"out": np.broadcast_to(np.zeros(16, np.float32), (1, 3, 16))}, "writable"),
    ],
    ids=str,
)
def test_what_the_kernels_could_misread_is_refused(change, message):
    values = {
        "pixels": draw(0, 8, 8),
        "order": Order(np.array([[0, 0]]), 4, 4),
        "table": PALETTE.table,
        "out": np.zeros((1, 3, 16), np.float32),
    }
    with pytest.raises(ValueError, match=message):
        pictures.cut(**(values | change))


@pytest.mark.parametrize(
    "pixels", [np.zeros((8, 8), np.uint8), np.zeros((8, 8, 3)), np.zeros((0, 8, 3), np.uint8)]
)
def test_a_resize_of_something_else_is_refused(pixels):
    with pytest.raises(ValueError, match=r"bytes \(height, width, 3\)"):
        pictures.resize(pixels, 4, 4, Resampling.BICUBIC)
