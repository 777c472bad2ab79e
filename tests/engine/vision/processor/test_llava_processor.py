"""Tests of LLaVA-1.5's processor against Hugging Face's CLIP, SigLIP and LLaVA PIL processors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.thorough import others_slow
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from fovea.core.errors import CheckpointError, InvalidImage, InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.engine.vision.processor import build

CLIP: dict[str, Any] = {
    "_valid_processor_keys": ["images"],
    "crop_size": {"height": 336, "width": 336},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "CLIPImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "processor_class": "LlavaProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"shortest_edge": 336},
}
MODEL: dict[str, Any] = {
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
    "vision_feature_select_strategy": "default",
}
PROCESSOR: dict[str, Any] = {
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
}
SIZES = [
    (1, 1), (2, 3), (336, 336), (337, 335), (335, 336),
    (640, 480), (481, 641), (100, 20), (20, 100), (1500, 90),
    (90, 1501), (1024, 768), (1999, 1333), (7, 1400),
]  # fmt: skip
QUICK = ((1, 1), (337, 335), (481, 641), (20, 100))
"""Sizes of the default run: the smallest, a side beside a limit, a usual one, and a long one."""


@pytest.mark.parametrize("size", others_slow(SIZES, QUICK), ids=lambda size: "x".join(map(str, size)))
def test_bit_exact(size, make_image, reference, run):
    image = make_image(*size)
    result = run(build("llava", CLIP, MODEL, PROCESSOR), image)
    expected = reference(CLIPImageProcessorPil(**CLIP), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"])
    assert result.plan.text == LlavaProcessor.replace_image_token(SimpleNamespace(**PROCESSOR), expected, 0)
    assert result.plan.tokens == 576
    assert result.plan.grid == (1, 24, 24)


@pytest.mark.parametrize(
    "size",
    others_slow(
        [(64, 64), (640, 481), (333, 517), (1, 9), (1200, 31), (31, 1201), (3, 600)],
        [(64, 64), (333, 517), (1200, 31)],
    ),
    ids=str,
)
@pytest.mark.parametrize("do_pad", [True, False])
def test_own_class_pads_to_a_square(size, do_pad, make_image, reference, run):
    config = {**CLIP, "image_processor_type": "LlavaImageProcessorFast", "do_pad": do_pad}
    image = make_image(*size)
    result = run(build("llava", config, MODEL), image)
    own = {key: value for key, value in config.items() if key != "image_processor_type"}
    assert np.array_equal(
        result.arrays["pixel_values"], reference(LlavaImageProcessorPil(**own), image)["pixel_values"]
    )


@pytest.mark.parametrize(
    "change",
    [
        {"size": {"shortest_edge": 300}},
        {"size": {"shortest_edge": 400, "longest_edge": 500}},
        {"size": {"shortest_edge": 400, "longest_edge": 401}},
        {"size": 350},
        {"size": 350, "default_to_square": True},
        {"size": {"height": 340, "width": 350}},
        {"do_resize": False},
        {"do_center_crop": False, "size": {"height": 336, "width": 336}},
        {"resample": 2},
        {"do_normalize": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", others_slow([(640, 480), (211, 503), (400, 400)], [(211, 503)]), ids=str)
def test_settings_are_honoured(change, size, make_image, reference, run):
    config = {**CLIP, **change}
    image = make_image(*size)
    result = run(build("llava", config, MODEL), image)
    expected = reference(CLIPImageProcessorPil(**config), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"])


def test_siglip(make_image, reference, run):
    image = make_image(320, 200)
    model = {"vision_config": {"model_type": "siglip_vision_model"}, "vision_feature_select_strategy": "full"}
    result = run(build("llava", {"image_processor_type": "SiglipImageProcessor"}, model), image)
    assert np.array_equal(
        result.arrays["pixel_values"], reference(SiglipImageProcessorPil(), image)["pixel_values"]
    )
    assert result.plan.tokens == 14 * 14


@pytest.mark.parametrize(("strategy", "tokens"), [("default", 576), ("full", 577)])
def test_class_token_is_counted_without_a_processor_config(strategy, tokens):
    model = {**MODEL, "vision_feature_select_strategy": strategy}
    assert build("llava", CLIP, model).plan(5, 5, PixelBudget()).tokens == tokens


def test_detail_changes_nothing():
    processor = build("llava", CLIP, MODEL)
    plans = {processor.plan(640, 480, PixelBudget(detail=detail)) for detail in ("low", "auto", "high")}
    assert len(plans) == 1
    fits = PixelBudget(min_pixels=336 * 336, max_pixels=336 * 336)
    assert processor.plan(640, 480, fits) in plans


@pytest.mark.parametrize(
    "budget", [PixelBudget(max_pixels=336 * 336 - 1), PixelBudget(min_pixels=336 * 336 + 1)], ids=str
)
def test_bounds_that_exclude_the_only_resolution_are_refused(budget):
    with pytest.raises(InvalidRequest, match="fixed resolution of 112896"):
        build("llava", CLIP, MODEL).plan(640, 480, budget)


def test_an_image_that_would_fill_the_memory_is_refused():
    with pytest.raises(InvalidImage, match="200 times"):
        build("llava", CLIP, MODEL).plan(100_000, 2, PixelBudget())


@pytest.mark.parametrize(
    ("config", "model", "processor"),
    [
        ({"do_center_crop": False}, {}, {}),
        ({"crop_size": {"height": 224, "width": 224}}, {}, {}),
        ({"crop_size": {"height": 336}}, {}, {}),
        ({"size": {"longest_edge": 336}}, {}, {}),
        ({"size": {"shortest_edge": -1}}, {}, {}),
        ({"size": {"height": "tall"}}, {}, {}),
        ({"size": {"depth": 3}}, {}, {}),
        ({"resample": 9}, {}, {}),
        ({"resample": "bicubic"}, {}, {}),
        ({"do_resize": "yes"}, {}, {}),
        ({"rescale_factor": "1/255"}, {}, {}),
        ({"image_mean": [0.5, 0.5]}, {}, {}),
        ({"image_std": [0.5, 0, 0.5]}, {}, {}),
        ({"pad_size": {"height": 400, "width": 400}}, {}, {}),
        ({"do_flip_channel_order": True}, {}, {}),
        ({"image_grid_pinpoints": [[336, 336]]}, {}, {}),
        ({}, {"vision_feature_select_strategy": "cls"}, {}),
        ({}, {}, {"vision_feature_select_strategy": "full"}),
        ({}, {}, {"patch_size": 16}),
        ({}, {}, {"num_additional_image_tokens": -1}),
        (
            {},
            {"vision_config": {"model_type": "dinov2", "image_size": 336, "patch_size": 14}},
            {"num_additional_image_tokens": None},
        ),
        ({}, {"vision_config": {"image_size": [336, 336]}}, {}),
        ({}, {"vision_config": 5}, {}),
    ],
    ids=str,
)
def test_bad_checkpoints(config, model, processor):
    with pytest.raises(CheckpointError):
        build("llava", {**CLIP, **config}, {**MODEL, **model}, {**PROCESSOR, **processor})


def test_settings_without_effect_are_accepted():
    harmless = {
        "do_flip_channel_order": False,
        "pad_size": None,
        "name": "x",
        "video_pixels": 3,
        "padding_side": "left",
    }
    build("llava", {**CLIP, **harmless}, MODEL)


def test_other_processor_classes_are_refused():
    with pytest.raises(UnsupportedModel, match="PixtralImageProcessor"):
        build("llava", {**CLIP, "image_processor_type": "PixtralImageProcessor"}, MODEL)
    build(
        "llava",
        {**CLIP, "image_processor_type": None, "feature_extractor_type": "CLIPFeatureExtractor"},
        MODEL,
    )
