"""Tests of the processor of Qwen2-VL, Qwen2.5-VL and Qwen3-VL against Hugging Face's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.pixels import in_time
from tests.support.thorough import examples, others_slow
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as their_smart_resize

from fovea.core.errors import CheckpointError, InvalidImage, InvalidRequest
from fovea.core.media import PixelBudget
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.sizes import smart_resize

QWEN2: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
}
QWEN3: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "crop_size": None,
    "do_center_crop": None,
    "do_pad": None,
}
KINDS = {"qwen2_vl": QWEN2, "qwen2_5_vl": QWEN2, "qwen3_vl": QWEN3}
SIZES = [
    (1, 1), (3, 2), (27, 29), (28, 28), (70, 42), (199, 1),
    (1, 200), (640, 480), (477, 1023), (1600, 90), (333, 1999),
    (896, 896), (1365, 1024),
]  # fmt: skip
QUICK = ((1, 1), (27, 29), (477, 1023), (1, 200))
"""Sizes of the default run: the smallest, a side beside a limit, a usual one, and a long one."""


def theirs(config: dict[str, Any]) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(**{key: value for key, value in config.items() if value is not None})


@pytest.mark.parametrize("size", others_slow(SIZES, QUICK), ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("kind", KINDS)
def test_bit_exact(kind, size, make_image, reference, run):
    image = make_image(*size)
    result = run(build(kind, KINDS[kind], {}), image)
    expected = reference(theirs(KINDS[kind]), image)
    assert np.array_equal(in_time(result.arrays["pixel_values"]), expected["pixel_values"])
    assert np.array_equal(result.arrays["grid_thw"], expected["image_grid_thw"])
    assert result.arrays["grid_thw"].dtype == np.int64
    assert result.plan.tokens == int(expected["image_grid_thw"][0].prod()) // 4
    assert result.plan.text == "<|image_pad|>" * result.plan.tokens
    assert result.plan.grid == tuple(expected["image_grid_thw"][0])


@pytest.mark.parametrize(
    "change",
    [
        {"resample": 0},
        {"resample": 1},
        {"resample": 5},
        {"do_rescale": False},
        {"do_normalize": False},
        {"do_rescale": False, "do_normalize": False},
        {"rescale_factor": 1 / 127.5},
        {"image_mean": 0.4, "image_std": 0.3},
        {"temporal_patch_size": 1},
        {"merge_size": 1},
        {"merge_size": 4, "patch_size": 8},
        {"max_pixels": 100_000, "min_pixels": 50_000},
        {"max_pixels": None, "min_pixels": None},
        {"max_pixels": None, "min_pixels": None, "size": {"shortest_edge": 784, "longest_edge": 78400}},
        {"size": {"shortest_edge": 1, "longest_edge": 2}},
    ],
    ids=str,
)
def test_settings_are_honoured(change, make_image, reference, run):
    config = {**QWEN2, **change}
    image = make_image(301, 203)
    result = run(build("qwen2_vl", config, {}), image)
    pixels = in_time(result.arrays["pixel_values"], config["temporal_patch_size"])
    assert np.array_equal(pixels, reference(theirs(config), image)["pixel_values"])


def test_without_resize(make_image, reference, run):
    config = {**QWEN2, "do_resize": False}
    image = make_image(280, 56)
    result = run(build("qwen2_vl", config, {}), image)
    assert np.array_equal(
        in_time(result.arrays["pixel_values"]), reference(theirs(config), image)["pixel_values"]
    )
    with pytest.raises(InvalidImage, match="multiples of 28"):
        build("qwen2_vl", config, {}).plan(281, 56, PixelBudget())
    with pytest.raises(InvalidRequest, match="does not resize"):
        build("qwen2_vl", config, {}).plan(280, 56, PixelBudget(max_pixels=1000))


def test_limits_named_as_pixels_inside_size():
    config = {
        **QWEN2,
        "min_pixels": None,
        "max_pixels": None,
        "size": {"min_pixels": 784, "max_pixels": 7840},
    }
    assert build("qwen2_vl", config, {}).plan(1000, 1000, PixelBudget()).tokens == 9


def test_missing_sizes_come_from_the_encoder():
    config = {key: value for key, value in QWEN3.items() if key not in ("patch_size", "merge_size")}
    result = build("qwen3_vl", config, {"vision_config": {"patch_size": 16, "spatial_merge_size": 2}})
    assert result.plan(640, 640, PixelBudget()).tokens == 400


@given(
    st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([(28, 3136, 12845056), (32, 65536, 16777216)])
)
def test_smart_resize_equals_theirs(height, width, limits):
    factor, low, high = limits
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidImage):
            smart_resize(height, width, factor, low, high)
    else:
        assert smart_resize(height, width, factor, low, high) == their_smart_resize(
            height, width, factor, low, high
        )


@settings(max_examples=examples(300))
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(784, 12845056))
def test_max_pixels_is_never_exceeded_and_the_size_is_theirs_otherwise(width, height, most):
    processor = build("qwen2_vl", QWEN2, {})
    if max(height, width) > 200 * min(height, width):
        return
    plan = processor.plan(width, height, PixelBudget(max_pixels=most))
    new_height, new_width = plan.sizes[0]
    assert 784 <= new_height * new_width <= most
    assert new_height % 28 == new_width % 28 == 0
    assert plan.tokens == new_height * new_width // 784
    expected = their_smart_resize(height, width, 28, min(3136, most), most)
    if expected[0] * expected[1] <= most:
        assert (new_height, new_width) == expected


@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.integers(1, 1_000_000),
    st.sampled_from(["qwen2_vl", "qwen3_vl"]),
)
def test_min_pixels_is_met_below_a_distant_maximum(width, height, least, kind):
    if max(height, width) > 200 * min(height, width):
        return
    plan = build(kind, KINDS[kind], {}).plan(width, height, PixelBudget(min_pixels=least))
    assert plan.sizes[0][0] * plan.sizes[0][1] >= least


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from(["qwen2_vl", "qwen3_vl"]))
def test_levels_are_at_most_64_and_256_tokens_and_auto_equals_high(width, height, kind):
    processor = build(kind, KINDS[kind], {})
    if max(height, width) > 200 * min(height, width):
        return
    low = processor.plan(width, height, PixelBudget(detail="low")).tokens
    medium = processor.plan(width, height, PixelBudget(detail="medium")).tokens
    assert low <= 64
    assert low <= medium <= 256
    auto = processor.plan(width, height, PixelBudget())
    assert auto == processor.plan(width, height, PixelBudget(detail="high"))
    explicit = PixelBudget(detail="low", max_pixels=processor.max_pixels)
    assert medium <= auto.tokens
    if auto.tokens < 4000:
        assert processor.plan(width, height, explicit) == auto


def test_pixels_of_a_budget_equal_theirs(make_image, reference, run):
    image = make_image(640, 480)
    result = run(build("qwen2_vl", QWEN2, {}), image, PixelBudget(max_pixels=100_000, min_pixels=40_000))
    expected = reference(theirs(QWEN2), image, size={"shortest_edge": 40_000, "longest_edge": 100_000})
    assert np.array_equal(in_time(result.arrays["pixel_values"]), expected["pixel_values"])
    low = run(build("qwen2_vl", QWEN2, {}), image, PixelBudget(detail="low"))
    expected = reference(theirs(QWEN2), image, size={"shortest_edge": 3136, "longest_edge": 64 * 784})
    assert np.array_equal(in_time(low.arrays["pixel_values"]), expected["pixel_values"])
    assert low.plan.key != result.plan.key


@pytest.mark.parametrize(
    ("budget", "param", "message"),
    [
        (PixelBudget(max_pixels=12845057), "max_pixels", "12845056"),
        (PixelBudget(max_pixels=783), "max_pixels", "784"),
        (PixelBudget(max_pixels=0), "max_pixels", "positive"),
        (PixelBudget(min_pixels=-5), "min_pixels", "positive"),
        (PixelBudget(min_pixels=12845057), "min_pixels", "12845056"),
        (PixelBudget(min_pixels=2000, max_pixels=1000), "min_pixels", "above max_pixels"),
        (PixelBudget(max_pixels=True), "max_pixels", "positive"),
        (PixelBudget(detail="middling"), "detail", "auto, low, medium, high"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_bad_budgets(budget, param, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        build("qwen2_vl", QWEN2, {}).plan(640, 480, budget)
    assert caught.value.param == param


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (0, 5)])
def test_bad_dimensions(size):
    with pytest.raises(InvalidImage):
        build("qwen2_vl", QWEN2, {}).plan(*size, PixelBudget())


@pytest.mark.parametrize(
    ("config", "model", "param"),
    [
        ({"size": {"height": 5, "width": 5}, "max_pixels": None, "min_pixels": None}, {}, "size"),
        ({"min_pixels": 20, "max_pixels": 10}, {}, "size"),
        ({"min_pixels": 20, "max_pixels": 500}, {}, "max_pixels"),
        ({"patch_size": 14}, {"vision_config": {"patch_size": 16}}, "patch_size"),
        ({"merge_size": 2}, {"vision_config": {"spatial_merge_size": 4}}, "merge_size"),
    ],
    ids=str,
)
def test_bad_checkpoints(config, model, param):
    with pytest.raises(CheckpointError) as caught:
        build("qwen2_vl", {**QWEN2, **config}, model)
    assert caught.value.param == param
