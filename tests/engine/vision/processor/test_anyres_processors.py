"""Tests of the processors of LLaVA-NeXT and LLaVA-OneVision against Hugging Face's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.thorough import others_slow
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import unpad_image
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from fovea.core.errors import CheckpointError, InvalidRequest
from fovea.core.media import PixelBudget
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.anyres import best_canvas, size_without_border

NEXT: dict[str, Any] = {
    "aspect_ratio_setting": "anyres",
    "crop_size": {"height": 336, "width": 336},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_pad": True,
    "do_resize": True,
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "image_processor_type": "LlavaNextImageProcessor",
    "resample": 3,
    "size": {"shortest_edge": 336},
}
NEXT_MODEL: dict[str, Any] = {
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
    "image_grid_pinpoints": NEXT["image_grid_pinpoints"],
}
NEXT_PROCESSOR: dict[str, Any] = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
}
ONE: dict[str, Any] = {
    "do_pad": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "size": {"height": 384, "width": 384},
}
ONE_MODEL: dict[str, Any] = {
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
    "vision_aspect_ratio": "anyres_max_9",
}
ONE_PROCESSOR: dict[str, Any] = {
    "num_image_tokens": 729,
    "vision_feature_select_strategy": "full",
    "image_token": "<image>",
    "vision_aspect_ratio": "anyres_max_9",
}
SIZES = [
    (1, 1), (3, 2), (336, 336), (384, 384), (385, 383),
    (640, 480), (477, 641), (1000, 97), (97, 1003), (1344, 672),
    (1024, 768), (1300, 1999), (2400, 300), (900, 7),
]  # fmt: skip
QUICK = ((1, 1), (385, 383), (477, 641), (97, 1003))
"""Sizes of the default run: the smallest, a side beside a limit, a usual one, and a long one."""


def their_next(config: dict[str, Any], processor: dict[str, Any] = NEXT_PROCESSOR) -> Any:
    """The methods that count tokens, without the tokenizer that the whole class needs."""
    stub = SimpleNamespace(image_processor=LlavaNextImageProcessorPil(**config), **processor)
    for name in ("_get_number_of_features", "_get_unpadded_features", "replace_image_token"):
        setattr(stub, name, getattr(LlavaNextProcessor, name).__get__(stub))
    return stub


def their_one(config: dict[str, Any], processor: dict[str, Any] = ONE_PROCESSOR) -> Any:
    stub = SimpleNamespace(image_processor=LlavaOnevisionImageProcessorPil(**config), **processor)
    for name in ("_get_number_of_features", "_get_unpadded_features", "replace_image_token"):
        setattr(stub, name, getattr(LlavaOnevisionProcessor, name).__get__(stub))
    return stub


KINDS = {
    "llava_next": (NEXT, NEXT_MODEL, NEXT_PROCESSOR, their_next),
    "llava_onevision": (ONE, ONE_MODEL, ONE_PROCESSOR, their_one),
}


@pytest.mark.parametrize("size", others_slow(SIZES, QUICK), ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("kind", KINDS)
def test_bit_exact(kind, size, make_image, reference, run):
    config, model, processor, stub = KINDS[kind]
    image = make_image(*size)
    result = run(build(kind, config, model, processor), image)
    theirs = stub(config)
    expected = reference(theirs.image_processor, image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"][0])
    assert np.array_equal(result.arrays["image_sizes"], expected["image_sizes"])
    assert result.plan.text == theirs.replace_image_token(expected, 0)
    assert result.plan.text == "<image>" * result.plan.tokens
    assert result.plan.grid[1] * result.plan.grid[2] + 1 == len(result.arrays["pixel_values"])


@pytest.mark.parametrize(
    "change",
    [
        {"size": {"shortest_edge": 224}},
        {"size": {"height": 336, "width": 336}},
        {"size": {"height": 400, "width": 336}},
        {"do_center_crop": False},
        {"do_resize": False},
        {"do_resize": False, "do_center_crop": False},
        {"do_pad": False},
        {"resample": 1},
        {"do_normalize": False},
        {"image_grid_pinpoints": [[672, 672], [336, 336], [1344, 336]]},
    ],
    ids=str,
)
def test_settings_are_honoured(change, make_image, reference, run):
    config = {**NEXT, **change}
    image = make_image(500, 301)
    result = run(build("llava_next", config, {"vision_config": NEXT_MODEL["vision_config"]}), image)
    expected = reference(LlavaNextImageProcessorPil(**config), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"][0])


def test_tiles_that_are_larger_than_the_tower(make_image, reference, run):
    """Tiles are larger than the tower's input. The resize that every tile goes through makes them smaller."""
    config = {
        **NEXT,
        "do_center_crop": False,
        "crop_size": {"height": 672, "width": 672},
        "size": {"height": 336, "width": 336},
    }
    config["image_grid_pinpoints"] = [[672, 672], [672, 1344]]
    image = make_image(500, 301)
    result = run(build("llava_next", config, {"vision_config": NEXT_MODEL["vision_config"]}), image)
    expected = reference(LlavaNextImageProcessorPil(**config), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"][0])


@given(st.integers(1, 6000), st.integers(1, 6000), st.sampled_from(sorted(KINDS)))
def test_token_counts_equal_theirs(width, height, kind):
    config, model, processor, stub = KINDS[kind]
    edge = 336 if kind == "llava_next" else 384
    plan = build(kind, config, model, processor).plan(width, height, PixelBudget())
    expected = stub(config)._get_number_of_features(height, width, edge, edge)
    assert plan.tokens == expected - (kind == "llava_next")


@given(st.integers(1, 6000), st.integers(1, 6000))
def test_best_canvas_equals_theirs(width, height):
    canvases = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008), (672, 672)]
    assert best_canvas(height, width, canvases) == select_best_resolution((height, width), canvases)


@given(st.integers(1, 6000), st.integers(1, 6000), st.integers(1, 6), st.integers(1, 6))
def test_the_size_without_border_equals_that_of_their_model(width, height, rows, columns):
    torch = pytest.importorskip("torch")
    features = torch.empty((1, 24 * rows, 24 * columns), device="meta")
    remaining = unpad_image(features, (height, width)).shape[1:]
    assert size_without_border(height, width, 24 * rows, 24 * columns) == tuple(remaining)


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 6_000_000), st.sampled_from(sorted(KINDS)))
def test_max_pixels_restricts_the_canvases(width, height, most, kind):
    config, model, processor, stub = KINDS[kind]
    ours = build(kind, config, model, processor)
    plan = ours.plan(width, height, PixelBudget(max_pixels=most))
    tile = ours.anyres.tile
    smallest = min(a * b for a, b in ours.anyres.canvases)
    assert plan.grid[1] * plan.grid[2] * tile * tile <= max(most, smallest)
    canvases = [
        list(canvas) for canvas in ours.anyres.canvases if canvas[0] * canvas[1] <= max(most, smallest)
    ]
    expected = stub({**config, "image_grid_pinpoints": canvases})._get_number_of_features(
        height, width, tile, tile
    )
    assert plan.tokens == expected - (kind == "llava_next")


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_of_a_budget_equal_theirs_on_fewer_canvases(kind, make_image, reference, run):
    config, model, processor, stub = KINDS[kind]
    ours = build(kind, config, model, processor)
    image = make_image(900, 500)
    smallest = min(a * b for a, b in ours.anyres.canvases)
    canvases = [list(canvas) for canvas in ours.anyres.canvases if canvas[0] * canvas[1] == smallest]
    expected = reference(stub({**config, "image_grid_pinpoints": canvases}).image_processor, image)[
        "pixel_values"
    ][0]
    low = run(ours, image, PixelBudget(detail="low"))
    assert np.array_equal(low.arrays["pixel_values"], expected)
    assert ours.plan(900, 500, PixelBudget(max_pixels=1)) == low.plan
    auto = ours.plan(900, 500, PixelBudget())
    assert auto == ours.plan(900, 500, PixelBudget(detail="high"))
    assert auto.key != low.plan.key
    assert auto.tokens > low.plan.tokens
    medium = ours.plan(900, 500, PixelBudget(detail="medium"))
    assert low.plan.tokens <= medium.tokens <= auto.tokens
    # OneVision's canvases have 1 to 36 tiles, so "medium" has up to 6. NeXT's have 2 to 4, so "medium" has 2.
    assert medium.grid[1] * medium.grid[2] <= (6 if kind == "llava_onevision" else 2)
    assert (medium == low.plan) == (kind != "llava_onevision")


@pytest.mark.parametrize("size", [(640, 480), (481, 641), (384, 384), (9, 400), (1999, 1300)], ids=str)
def test_onevision_encodes_one_image_among_several_as_a_whole(size, make_image):
    """Hugging Face's processor takes a nested list for the images of one conversation."""
    processor = build("llava_onevision", ONE, ONE_MODEL, ONE_PROCESSOR)
    image = make_image(*size)
    plan = processor.plan(*size, PixelBudget(), images=2)
    result = processor.process(image, plan)
    theirs = their_one(ONE)
    picture = PIL.Image.frombytes("RGB", size, image.rgb)
    expected = theirs.image_processor(images=[[picture, picture]], return_tensors="np")
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"][0])
    assert plan.text == theirs.replace_image_token(expected, 0)
    assert plan.tokens == 730
    assert plan.grid == (1, 0, 0)
    assert plan.key != processor.plan(*size, PixelBudget()).key
    assert plan == processor.plan(*size, PixelBudget(max_pixels=1), images=3)
    with pytest.raises(InvalidRequest, match="fixed resolution"):
        processor.plan(*size, PixelBudget(min_pixels=384 * 384 + 1), images=2)


def test_min_pixels_restricts_the_canvases():
    ours = build("llava_next", NEXT, NEXT_MODEL)
    assert ours.plan(10, 20, PixelBudget(min_pixels=672 * 672)).grid == (1, 2, 2)
    for budget in (
        PixelBudget(min_pixels=672 * 672 + 1),
        PixelBudget(min_pixels=226_000, max_pixels=230_000),
    ):
        with pytest.raises(InvalidRequest, match="225792, 338688, 451584") as caught:
            ours.plan(10, 20, budget)
        assert caught.value.param == "min_pixels"


@pytest.mark.parametrize(
    ("kind", "config", "model", "processor"),
    [
        ("llava_next", {"image_grid_pinpoints": []}, {}, {}),
        ("llava_next", {"image_grid_pinpoints": [[336, 300]]}, {}, {}),
        ("llava_next", {"image_grid_pinpoints": [336]}, {}, {}),
        ("llava_next", {"image_grid_pinpoints": [[336, 672]]}, {}, {}),
        ("llava_next", {"do_center_crop": False, "size": {"height": 336, "width": 300}}, {}, {}),
        ("llava_next", {}, {"vision_config": {"image_size": 224, "patch_size": 14}}, {}),
        ("llava_onevision", {"max_tiles": 5}, {}, {}),
        ("llava_onevision", {"do_center_crop": True}, {}, {}),
        ("llava_onevision", {}, {}, {"num_image_tokens": 196}),
        ("llava_onevision", {}, {}, {"vision_aspect_ratio": "anyres_max_4"}),
        ("llava_onevision", {}, {"vision_aspect_ratio": "pad"}, {"vision_aspect_ratio": "pad"}),
        ("llava_onevision", {}, {"image_grid_pinpoints": [[384, 384]]}, {}),
    ],
    ids=str,
)
def test_bad_checkpoints(kind, config, model, processor):
    base = KINDS[kind]
    with pytest.raises(CheckpointError):
        build(kind, {**base[0], **config}, {**base[1], **model}, {**base[2], **processor})
