"""Tests of the processor of PaddleOCR-VL against Hugging Face's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.reference import skip_before
from tests.support.thorough import examples, others_slow
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    smart_resize as their_smart_resize,
)

from fovea.core.errors import CheckpointError, InvalidImage, InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.qwen import enlarging_resize

PUBLISHED: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "PaddleOCRVLImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_pixels": 1003520,
    "merge_size": 2,
    "min_pixels": 112896,
    "patch_size": 14,
    "processor_class": "PaddleOCRVLProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"max_pixels": 1003520, "min_pixels": 112896},
    "temporal_patch_size": 1,
}
SMALL = {"min_pixels": 784, "max_pixels": 78400}
VISION = {"vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}}
"""The published tower's configuration names a temporal patch size that its code does not use."""
SIZES = [
    (1, 1), (1, 2), (3, 2), (5, 27), (27, 29), (28, 28), (70, 42), (199, 1), (1, 200), (27, 1),
    (640, 480), (477, 1023), (1600, 90), (333, 1999), (896, 896), (13, 2600),
]  # fmt: skip
QUICK = ((1, 1), (27, 29), (477, 1023), (1, 200))
"""Sizes of the default run: the smallest, a side beside a limit, a usual one, and a long one."""
LARGEST = 40 * 28 * 28


def theirs(config: dict[str, Any]) -> PaddleOCRVLImageProcessorPil:
    return PaddleOCRVLImageProcessorPil(**{key: value for key, value in config.items() if value is not None})


def in_merge_order(rows: Any, grid: Any, merge: int = 2) -> np.ndarray:
    """Their patches (t*h*w, 3, patch, patch), which come row by row, as (t*h*w, values) in merge order."""
    _, height, width = grid
    blocks = rows.reshape(height // merge, merge, width // merge, merge, -1).swapaxes(1, 2)
    return np.asarray(blocks.reshape(height * width, -1))


@pytest.mark.parametrize("size", others_slow(SIZES, QUICK), ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("limits", [{}, SMALL], ids=["published", "small"])
def test_bit_exact(limits, size, make_image, reference, run):
    """Patches are those of Hugging Face's, in merge order; the token count is that of its processor class."""
    image, config = make_image(*size), PUBLISHED | limits
    result = run(build("paddleocr_vl", config, VISION), image)
    expected = reference(theirs(config), image)
    grid = expected["image_grid_thw"][0]
    assert np.array_equal(result.arrays["pixel_values"], in_merge_order(expected["pixel_values"], grid))
    assert np.array_equal(result.arrays["grid_thw"], [grid])
    assert result.plan.grid == tuple(grid)
    # PaddleOCRVLProcessor.replace_image_token
    assert result.plan.tokens == int(grid.prod()) // 4
    assert result.plan.text == "<|IMAGE_PLACEHOLDER|>" * result.plan.tokens


@pytest.mark.parametrize(
    "change",
    [
        {"resample": 0},
        {"resample": 1},
        {"do_rescale": False},
        {"do_normalize": False},
        {"rescale_factor": 1 / 127.5},
        {"image_mean": None, "image_std": None},
        {"merge_size": 1},
        {"merge_size": 4, "patch_size": 8},
        {"max_pixels": None, "min_pixels": None, "size": None},
        {"max_pixels": None, "min_pixels": None, "size": {"shortest_edge": 784, "longest_edge": 78400}},
    ],
    ids=str,
)
def test_settings_are_honoured(change, make_image, reference, run):
    config = {**PUBLISHED, **change}
    if config["size"] is None:
        skip_before("5.18", "takes the sizes of processors made before for those of its class")
    image = make_image(301, 203)
    result = run(build("paddleocr_vl", config, {}), image)
    expected = reference(theirs(config), image)
    rows = in_merge_order(expected["pixel_values"], expected["image_grid_thw"][0], config["merge_size"])
    assert np.array_equal(result.arrays["pixel_values"], rows)


@settings(max_examples=examples(400))
@given(
    st.one_of(st.integers(1, 60), st.integers(1, 9000)),
    st.one_of(st.integers(1, 60), st.integers(1, 9000)),
    st.sampled_from([(28, 112896, 1003520), (28, 147456, 2359296), (32, 1024, 65536)]),
)
def test_the_size_equals_theirs(height, width, limits):
    try:
        expected = their_smart_resize(height, width, *limits)
    except ValueError:
        with pytest.raises(InvalidImage, match="200"):
            enlarging_resize(height, width, *limits)
    else:
        assert enlarging_resize(height, width, *limits) == expected


@settings(max_examples=examples(200))
@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(784, 1003520))
def test_a_clients_limits_hold(width, height, most):
    if max(height, width) > 200 * min(height, width):
        return
    processor = build("paddleocr_vl", PUBLISHED, {})
    plan = processor.plan(width, height, PixelBudget(max_pixels=most))
    new_height, new_width = plan.sizes[0]
    assert 784 <= new_height * new_width <= most
    assert new_height % 28 == new_width % 28 == 0
    assert plan.tokens == new_height * new_width // 784
    low = processor.plan(width, height, PixelBudget(detail="low"))
    medium = processor.plan(width, height, PixelBudget(detail="medium"))
    assert low.tokens <= 64
    assert low.tokens <= medium.tokens <= 256
    least = processor.plan(width, height, PixelBudget(min_pixels=most))
    assert least.sizes[0][0] * least.sizes[0][1] >= min(most, LARGEST)


@pytest.mark.parametrize(
    ("budget", "param"),
    [
        (PixelBudget(max_pixels=1003521), "max_pixels"),
        (PixelBudget(max_pixels=783), "max_pixels"),
        (PixelBudget(min_pixels=1003521), "min_pixels"),
    ],
    ids=str,
)
def test_bad_budgets(budget, param):
    with pytest.raises(InvalidRequest, match="this model accepts") as caught:
        build("paddleocr_vl", PUBLISHED, {}).plan(640, 480, budget)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("config", "model", "param"),
    [
        ({"temporal_patch_size": 2}, {}, "temporal_patch_size"),
        ({"do_center_crop": True}, {}, "do_center_crop"),
        ({"crop_size": 5}, {}, "crop_size"),
        ({}, {"vision_config": {"patch_size": 16}}, "patch_size"),
        ({}, {"vision_config": {"spatial_merge_size": 3}}, "merge_size"),
        ({"min_pixels": 20, "max_pixels": 10}, {}, "size"),
    ],
    ids=str,
)
def test_bad_checkpoints(config, model, param):
    with pytest.raises(CheckpointError) as caught:
        build("paddleocr_vl", {**PUBLISHED, **config}, model)
    assert caught.value.param == param


def test_processor_classes_of_other_families_are_refused():
    with pytest.raises(UnsupportedModel, match="accepted: PaddleOCRVLImageProcessor"):
        build("paddleocr_vl", PUBLISHED | {"image_processor_type": "Qwen2VLImageProcessor"}, {})
