"""Tests of the processor of GLM-4.1V against Hugging Face's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.pixels import in_time
from tests.support.thorough import examples, others_slow
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as their_smart_resize
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

from fovea.core.errors import CheckpointError, InvalidImage, InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.qwen import scaling_resize

PUBLISHED: dict[str, Any] = {
    "size": {"shortest_edge": 12544, "longest_edge": 9633792},
    "do_rescale": True,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Glm4vImageProcessor",
    "processor_class": "Glm4vProcessor",
}
SMALL = {"size": {"shortest_edge": 1568, "longest_edge": 156800}}
MOST = 9633792 // 2
"""Largest area of an image: the settings count its pixels twice, because it is two equal frames."""
SIZES = [
    (1, 1), (1, 2), (3, 2), (5, 27), (27, 29), (28, 28), (70, 42), (199, 1), (1, 200), (27, 1),
    (640, 480), (477, 1023), (1600, 90), (333, 1999), (896, 896), (13, 2600),
]  # fmt: skip
QUICK = ((1, 1), (27, 29), (477, 1023), (1, 200))
"""Sizes of the default run: the smallest, a side beside a limit, a usual one, and a long one."""


def theirs(config: dict[str, Any]) -> Glm4vImageProcessorPil:
    return Glm4vImageProcessorPil(**{key: value for key, value in config.items() if value is not None})


@pytest.mark.parametrize("size", others_slow(SIZES, QUICK), ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("limits", [{}, SMALL], ids=["published", "small"])
def test_bit_exact(limits, size, make_image, reference, run):
    image, config = make_image(*size), PUBLISHED | limits
    result = run(build("glm4v", config, {}), image)
    expected = reference(theirs(config), image)
    grid = expected["image_grid_thw"][0]
    assert np.array_equal(in_time(result.arrays["pixel_values"]), expected["pixel_values"])
    assert np.array_equal(result.arrays["grid_thw"], [grid])
    assert result.plan.grid == tuple(grid)
    # Glm4vProcessor.replace_image_token
    assert result.plan.tokens == int(grid.prod()) // 4
    assert result.plan.text == "<|image|>" * result.plan.tokens


@pytest.mark.parametrize(
    "change",
    [
        {"resample": 0},
        {"resample": 1},
        {"do_rescale": False},
        {"do_normalize": False},
        {"image_mean": 0.4, "image_std": 0.3},
        {"temporal_patch_size": 1},
        {"temporal_patch_size": 4},
        {"merge_size": 1},
        {"merge_size": 4, "patch_size": 8},
        {"size": None},
    ],
    ids=str,
)
def test_settings_are_honoured(change, make_image, reference, run):
    config = {**PUBLISHED, **change}
    image = make_image(301, 203)
    result = run(build("glm4v", config, {}), image)
    pixels = in_time(result.arrays["pixel_values"], config["temporal_patch_size"])
    assert np.array_equal(pixels, reference(theirs(config), image)["pixel_values"])


@settings(max_examples=examples(400))
@given(
    st.one_of(st.integers(1, 60), st.integers(1, 9000)),
    st.one_of(st.integers(1, 60), st.integers(1, 9000)),
    st.sampled_from([(28, 6272, MOST), (28, 6272, 5880000), (32, 1024, 65536)]),
    st.integers(1, 4),
)
def test_the_size_equals_theirs(height, width, limits, frames):
    factor, low, high = limits
    try:
        expected = their_smart_resize(
            frames, height, width, frames, factor=factor, min_pixels=frames * low, max_pixels=frames * high
        )
    except ValueError:
        with pytest.raises(InvalidImage, match="200"):
            scaling_resize(height, width, *limits)
    else:
        assert scaling_resize(height, width, *limits) == expected


@settings(max_examples=examples(200))
@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(784, MOST))
def test_a_clients_limits_hold_for_one_frame(width, height, most):
    if max(height, width) > 200 * min(height, width):
        return
    processor = build("glm4v", PUBLISHED, {})
    plan = processor.plan(width, height, PixelBudget(max_pixels=most))
    new_height, new_width = plan.sizes[0]
    assert 784 <= new_height * new_width <= most
    assert new_height % 28 == new_width % 28 == 0
    assert plan.tokens == new_height * new_width // 784
    low = processor.plan(width, height, PixelBudget(detail="low"))
    medium = processor.plan(width, height, PixelBudget(detail="medium"))
    assert low.tokens <= 64
    assert low.tokens <= medium.tokens <= 256


@pytest.mark.parametrize(
    ("budget", "param"),
    [
        (PixelBudget(max_pixels=MOST + 1), "max_pixels"),
        (PixelBudget(max_pixels=783), "max_pixels"),
        (PixelBudget(min_pixels=MOST + 1), "min_pixels"),
    ],
    ids=str,
)
def test_bad_budgets(budget, param):
    with pytest.raises(InvalidRequest, match="this model accepts") as caught:
        build("glm4v", PUBLISHED, {}).plan(640, 480, budget)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("config", "model", "param"),
    [
        ({"size": {"shortest_edge": 12544, "longest_edge": 9633793}}, {}, "size"),
        ({"size": {"height": 5, "width": 5}}, {}, "size"),
        ({"do_pad": True}, {}, "do_pad"),
        ({}, {"vision_config": {"patch_size": 16}}, "patch_size"),
        ({}, {"vision_config": {"spatial_merge_size": 3}}, "merge_size"),
        ({}, {"vision_config": {"temporal_patch_size": 1}}, "temporal_patch_size"),
    ],
    ids=str,
)
def test_bad_checkpoints(config, model, param):
    with pytest.raises(CheckpointError) as caught:
        build("glm4v", {**PUBLISHED, **config}, model)
    assert caught.value.param == param


@pytest.mark.parametrize("size", [(1, 1), (640, 480), (13, 2600)], ids=str)
def test_glm_4_6v_has_the_same_pixels(size, make_image, reference, run):
    image = make_image(*size)
    config = PUBLISHED | {"image_processor_type": "Glm46VImageProcessor"}
    result = run(build("glm46v", config, {}), image)
    own = Glm46VImageProcessorPil(**PUBLISHED)
    assert np.array_equal(in_time(result.arrays["pixel_values"]), reference(own, image)["pixel_values"])


def test_processor_classes_of_other_families_are_refused():
    with pytest.raises(UnsupportedModel, match="accepted: Glm4vImageProcessor"):
        build("glm4v", PUBLISHED | {"image_processor_type": "Qwen2VLImageProcessor"}, {})
