"""Tests of InternVL's processor against Hugging Face's PIL processor and prompt text, in both layouts.

The reference is the PIL class of the processor. Checkpoints for transformers name its torchvision class,
which resizes with torch. On pictures of noise, torch's bicubic filter for bytes differs from PIL's by up to
25 of 255 levels, and by 0.4 or less on average. InternVL's original code resizes with PIL.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.thorough import others_slow
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_all_supported_aspect_ratios,
    get_optimal_tiled_canvas,
)
from transformers.models.internvl.processing_internvl import InternVLProcessor

from fovea.core.errors import CheckpointError, InvalidRequest, UnsupportedModel
from fovea.core.media import Image, PixelBudget, VisualTokens
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.internvl import grids_of, nearest_grid
from fovea.engine.visual_budget.choose import RequestContext, VisualBudget

IMAGENET: dict[str, Any] = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
PUBLISHED: dict[str, Any] = {
    "crop_size": None,
    "crop_to_patches": False,
    "data_format": "channels_first",
    "default_to_square": True,
    "device": None,
    "do_center_crop": None,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_pad": None,
    "do_rescale": True,
    "do_resize": True,
    **IMAGENET,
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "max_patches": 12,
    "min_patches": 1,
    "processor_class": "InternVLProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 448, "width": 448},
    "size_divisor": None,
}
"""preprocessor_config.json as in published checkpoints for transformers."""
MODEL: dict[str, Any] = {
    "downsample_ratio": 0.5,
    "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
}
ORIGINAL: dict[str, Any] = {
    "crop_size": 448,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    **IMAGENET,
    "resample": 3,
    "size": 448,
}
"""preprocessor_config.json as in published checkpoints of the original layout."""
TILING = {"dynamic_image_size": True, "use_thumbnail": True, "min_dynamic_patch": 1, "max_dynamic_patch": 12}
AREA = 448 * 448
SIZES = [
    (1, 1), (3, 2), (448, 448), (449, 447), (896, 448), (640, 480), (481, 641), (1344, 900), (97, 1003),
    (2400, 300), (1500, 9), (1, 400), (900, 1900),
]  # fmt: skip
QUICK = ((1, 1), (449, 447), (481, 641), (97, 1003))
"""Sizes of the default run: the smallest, a side beside a limit, a usual one, and a long one."""
OPTIONS = ("do_normalize", "do_rescale", "image_mean", "image_std", "max_patches", "min_patches", "resample",
           "rescale_factor", "size")  # fmt: skip


def theirs(config: dict[str, Any] = PUBLISHED) -> Any:
    """Hugging Face's processor with the option that the processor class of the whole model sets."""
    options = {name: config[name] for name in OPTIONS if name in config}
    return GotOcr2ImageProcessorPil(**options, crop_to_patches=True)


def their_text(tiles: int, tokens: int = 256) -> str:
    stub = SimpleNamespace(
        start_image_token="<img>",
        end_image_token="</img>",
        image_token="<IMG_CONTEXT>",
        image_seq_length=tokens,
    )
    return InternVLProcessor.replace_image_token(stub, {"num_patches": [tiles]}, 0)


def ours(**changes: Any) -> Any:
    return build("internvl", {**PUBLISHED, **changes}, MODEL, {"image_seq_length": 256})


def original(**changes: Any) -> Any:
    return build("internvl_chat", ORIGINAL, {**MODEL, **TILING, **changes})


@pytest.mark.parametrize("size", others_slow(SIZES, QUICK), ids=lambda size: "x".join(map(str, size)))
def test_bit_exact(size, make_image, reference, run):
    image = make_image(*size)
    result = run(ours(), image)
    expected = reference(theirs(), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"])
    tiles = int(expected["num_patches"][0])
    assert result.plan.text == their_text(tiles)
    assert result.plan.tokens == result.plan.text.count("<IMG_CONTEXT>") == 256 * tiles
    assert result.plan.grid[0] + result.plan.grid[1] * result.plan.grid[2] == tiles


@pytest.mark.parametrize("size", [(640, 480), (1344, 900)], ids=str)
def test_the_original_layout_has_the_same_pixels_and_text(size, make_image, run):
    image = make_image(*size)
    first, second = run(ours(), image), run(original(), image)
    assert np.array_equal(first.arrays["pixel_values"], second.arrays["pixel_values"])
    assert first.plan == second.plan


@pytest.mark.parametrize(
    "change",
    [
        {"max_patches": 1},
        {"max_patches": 6},
        {"min_patches": 4},
        {"min_patches": 3, "max_patches": 3},
        {"size": {"height": 224, "width": 224}},
        {"resample": 2},
        {"do_normalize": False},
        {"do_rescale": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", others_slow([(300, 411), (900, 130)], [(300, 411)]), ids=str)
def test_settings_are_honoured(change, size, make_image, reference, run):
    config = {**PUBLISHED, **change}
    image = make_image(*size)
    edge = config["size"]["height"]
    model = {**MODEL, "vision_config": {"image_size": edge, "patch_size": 14}}
    result = run(build("internvl", config, model), image)
    expected = reference(theirs(config), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"])
    assert result.plan.tokens == len(expected["pixel_values"]) * (edge // 28) ** 2


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 5), st.integers(5, 40))
def test_grids_equal_theirs(width, height, least, most):
    grids = grids_of(least, most)
    assert [(columns, rows) for rows, columns in grids] == get_all_supported_aspect_ratios(least, most)
    columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), least, most)
    assert nearest_grid(height, width, 448, grids) == (rows, columns)


@given(st.integers(1, 9000), st.integers(1, 9000))
def test_token_counts_equal_theirs(width, height):
    stub = SimpleNamespace(
        image_processor=theirs(),
        image_seq_length=256,
        _merge_kwargs=lambda: {"images_kwargs": InternVLProcessor.images_kwargs},
    )
    expected = InternVLProcessor._get_num_multimodal_tokens(stub, [(height, width)]).num_image_tokens[0]
    assert ours().plan(width, height, PixelBudget()).tokens + 2 == expected


def test_the_original_layout_without_thumbnail_or_tiles(make_image, run):
    image = make_image(1344, 900)
    whole = run(ours(), image)
    assert whole.plan.grid == (1, 2, 3)
    plain = run(original(use_thumbnail=False), image)
    assert plain.plan.grid == (0, 2, 3)
    assert plain.plan.tokens == 6 * 256
    assert plain.plan.key != whole.plan.key
    assert np.array_equal(plain.arrays["pixel_values"], whole.arrays["pixel_values"][:-1])
    single = run(original(dynamic_image_size=False), image)
    assert single.plan.grid == (1, 0, 0)
    assert np.array_equal(single.arrays["pixel_values"], whole.arrays["pixel_values"][-1:])


def test_defaults_of_the_original_class():
    """One view, because dynamic_image_size is false unless config.json says otherwise."""
    processor = build("internvl_chat", ORIGINAL, MODEL)
    assert processor.plan(1344, 900, PixelBudget()).tokens == 256
    processor = build("internvl_chat", ORIGINAL, {**MODEL, "dynamic_image_size": True})
    assert (processor.least, processor.most, processor.whole) == (1, 6, False)


def test_low_is_the_whole_picture_as_one_tile(make_image, reference, run):
    image = make_image(1344, 900)
    result = run(ours(), image, PixelBudget(detail="low"))
    expected = reference(theirs({**PUBLISHED, "max_patches": 1}), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"])
    assert result.plan.grid == (1, 0, 0)
    assert result.plan.text == their_text(1)
    assert ours(min_patches=4).plan(1344, 900, PixelBudget(detail="low")).grid == (1, 0, 0)


def test_medium_is_a_number_of_tiles_in_between(make_image, reference, run):
    image = make_image(1344, 448)
    result = run(ours(), image, PixelBudget(detail="medium"))
    expected = reference(theirs({**PUBLISHED, "max_patches": math.isqrt(12)}), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"])
    assert result.plan.grid == (1, 1, 3)
    assert ours().plan(1344, 900, PixelBudget(detail="medium")).tokens < 7 * 256


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(AREA, 20 * AREA))
def test_max_pixels_is_never_exceeded(width, height, most):
    plan = ours().plan(width, height, PixelBudget(max_pixels=most))
    auto = ours().plan(width, height, PixelBudget())
    assert plan.sizes[0][0] * plan.sizes[0][1] <= most
    if most >= 12 * AREA:
        assert plan == auto
    assert auto == ours().plan(width, height, PixelBudget(detail="high"))


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 12 * AREA))
def test_min_pixels_is_met(width, height, least):
    plan = ours().plan(width, height, PixelBudget(min_pixels=least))
    assert plan.sizes[0][0] * plan.sizes[0][1] >= least


@pytest.mark.parametrize(
    ("budget", "param", "message"),
    [
        (PixelBudget(max_pixels=AREA - 1), "max_pixels", "accepts 200704"),
        (PixelBudget(min_pixels=12 * AREA + 1), "min_pixels", "at most 12 tiles"),
        (PixelBudget(min_pixels=2 * AREA + 1, max_pixels=3 * AREA - 1), "min_pixels", "at most 2 tiles"),
    ],
    ids=str,
)
def test_bad_budgets(budget, param, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        ours().plan(900, 900, budget)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"size": {"shortest_edge": 448}}, "height and width"),
        ({"size": {"height": 448, "width": 224}}, "of equal value"),
        ({"size": {"height": 336, "width": 336}}, "the model's config says 448"),
        ({"do_resize": False}, "do_resize is False"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"size_divisor": 32}, "size_divisor"),
        ({"min_patches": 3, "max_patches": 2}, "max_patches is 2"),
        ({"max_patches": 10**9}, "to 1024"),
    ],
    ids=str,
)
def test_bad_checkpoints(config, message):
    with pytest.raises(CheckpointError, match=message):
        ours(**config)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"downsample_ratio": 0.3}, "downsample_ratio is 0.3"),
        ({"downsample_ratio": 1 / 3}, "divides the 32 patches"),
        ({"vision_config": {"image_size": [448, 224]}}, "two equal ones"),
        ({"vision_config": {"image_size": "448"}}, "a positive integer"),
        ({"vision_config": {"image_size": 448, "patch_size": 28}}, "image_seq_length"),
    ],
    ids=str,
)
def test_contradictions_of_the_model(model, message):
    with pytest.raises(CheckpointError, match=message):
        build("internvl", PUBLISHED, {**MODEL, **model}, {"image_seq_length": 256})


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [
        ({"size": 224}, {}, "one edge for size and crop_size"),
        ({"size": 224, "crop_size": 224}, {}, "the model's config says 448"),
        ({"do_pad": True}, {}, "do_pad"),
        ({}, {"max_dynamic_patch": 0}, "config.json: max_dynamic_patch"),
        ({}, {"max_dynamic_patch": 2000}, "config.json: max_dynamic_patch is 2000"),
        ({}, {"use_thumbnail": 1}, "config.json: use_thumbnail is 1"),
    ],
    ids=str,
)
def test_bad_checkpoints_of_the_original_layout(config, model, message):
    with pytest.raises(CheckpointError, match=message):
        build("internvl_chat", {**ORIGINAL, **config}, {**MODEL, **TILING, **model})


def test_other_ways_to_write_the_edge_of_a_tile():
    settings = {**ORIGINAL, "size": {"shortest_edge": 448}, "crop_size": {"height": 448, "width": 448}}
    other = build("internvl_chat", settings, {**MODEL, **TILING})
    assert other.plan(900, 900, PixelBudget()) == original().plan(900, 900, PixelBudget())


@pytest.mark.parametrize("kind", ["internvl", "internvl_chat"])
def test_other_processor_classes_are_refused(kind):
    with pytest.raises(UnsupportedModel, match="SiglipImageProcessor"):
        build(kind, {"image_processor_type": "SiglipImageProcessor"}, MODEL)


def test_a_reduced_image_keeps_the_text_around_its_tokens():
    image, wish = Image("an image", 448, 448, bytes(3 * AREA)), VisualTokens("uniform", 0.25)
    budget = PixelBudget("high", visual=wish)
    plan = ours().plan(448, 448, budget)
    context = RequestContext("what is it?", "", 0.0)
    reduced = VisualBudget(ours(), lambda text: [], None).reduce(image, plan, budget, context)
    assert reduced is not None
    assert reduced.plan.text == their_text(1, tokens=64)
    assert reduced.plan.tokens == 64
