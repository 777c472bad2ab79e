"""Tests of the resize in bands against its naive twin, which makes the whole square."""

from __future__ import annotations

import numpy as np
import pytest
from PIL.Image import Resampling
from tests.support.thorough import others_slow

from fovea.engine.vision.processor.pixels import make_square, picture, resize, resize_squared


@pytest.mark.parametrize("resample", Resampling, ids=lambda resample: resample.name)
@pytest.mark.parametrize(
    "size",
    others_slow(
        [(700, 300), (300, 701), (257, 1), (1, 513), (600, 599), (512, 512), (20, 30)],
        [(300, 701), (257, 1), (512, 512), (20, 30)],
    ),
    ids=str,
)
def test_equals_the_naive_twin(size, resample, make_image):
    source = picture(make_image(*size))
    for height, width in ((384, 384), (224, 224), (max(size), max(size)), (10, 900)):
        naive = resize(make_square(source, (122, 116, 104)), height, width, resample)
        banded = resize_squared(source, (122, 116, 104), height, width, resample)
        assert np.array_equal(naive, banded)


def test_a_long_picture_does_not_become_a_square_in_memory():
    """The square would have 10 billion pixels."""
    source = np.full((2, 100_000, 3), 255, np.uint8)
    assert resize_squared(source, (0, 0, 0), 8, 8, Resampling.BICUBIC).shape == (8, 8, 3)
