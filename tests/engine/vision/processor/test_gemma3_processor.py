"""Tests of Gemma 3's processor: bit-exact with Hugging Face's PIL processor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.thorough import others_slow
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from fovea.core.errors import CheckpointError, InvalidImage, InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.engine.vision.processor import build

HALF = [0.5, 0.5, 0.5]
PUBLISHED: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor",
    "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True,
    "do_resize": True, "image_mean": HALF, "image_seq_length": 256, "image_std": HALF,
    "pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None, "resample": 2, "rescale_factor": 1 / 255,
    "size": {"height": 896, "width": 896},
}  # fmt: skip
"""preprocessor_config.json as in the published checkpoints."""
MODEL: dict[str, Any] = {
    "vision_config": {"image_size": 896, "patch_size": 14}, "mm_tokens_per_image": 256,
}  # fmt: skip
SMALL = {"size": {"height": 56, "width": 56}}
SIZES = [
    (1, 1), (2, 3), (1, 200), (200, 1), (3000, 2), (55, 57), (56, 56), (112, 112), (231, 57), (640, 480),
    (481, 641), (97, 1003), (1920, 1080), (5000, 16),
]  # fmt: skip
QUICK = ((1, 1), (55, 57), (481, 641), (97, 1003))
"""Sizes of the default run: the smallest, a side beside a limit, a usual one, and a long one."""


def theirs(**changes: Any) -> Any:
    config = {**PUBLISHED, **changes}
    names = ("image_processor_type", "processor_class", "image_seq_length")
    return Gemma3ImageProcessorPil(**{k: v for k, v in config.items() if k not in names})


def ours(processor: dict[str, Any] | None = None, **changes: Any) -> Any:
    config = {**PUBLISHED, **changes}
    edge = config["size"]["height"]
    model = {**MODEL, "vision_config": {"image_size": edge, "patch_size": 14}}
    return build("gemma3", config, model, processor or {})


def their_text(output: Any, count: int = 256) -> str:
    run = "<image_soft_token>" * count
    stub = SimpleNamespace(full_image_sequence=f"\n\n<start_of_image>{run}<end_of_image>\n\n")
    text: str = Gemma3Processor.replace_image_token(stub, output, 0)
    return text


@pytest.mark.parametrize("size", others_slow(SIZES, QUICK), ids=lambda size: "x".join(map(str, size)))
def test_bit_exact(size, make_image, reference, run):
    image = make_image(*size)
    result, expected = run(ours(**SMALL), image), reference(theirs(**SMALL), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"])
    assert result.plan.text == their_text(expected)
    assert result.plan.tokens == result.plan.text.count("<image_soft_token>") == 256
    assert result.plan.grid == (1, 4, 4)


@pytest.mark.parametrize("size", [(1, 1), (896, 896), (1300, 700)], ids=str)
def test_bit_exact_at_the_published_size(size, make_image, reference, run):
    image = make_image(*size)
    result, expected = run(ours(), image), reference(theirs(), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"])
    assert result.plan.grid == (1, 64, 64)


@pytest.mark.parametrize(
    "change",
    [
        {"resample": 3},
        {"resample": 1},
        {"do_normalize": False},
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5},
        {"image_mean": [0.4, 0.5, 0.6]},
        {"image_std": [0.2, 0.3, 0.4]},
    ],
    ids=str,
)
def test_settings_are_honoured(change, make_image, reference, run):
    image = make_image(300, 211)
    result, expected = run(ours(**SMALL, **change), image), reference(theirs(**SMALL, **change), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"])


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from(["auto", "low", "medium", "high"]))
def test_every_image_has_the_same_tokens_at_any_detail(width, height, detail):
    processor = ours()
    plan = processor.plan(width, height, PixelBudget(detail))
    assert (plan.tokens, plan.sizes) == (256, ((896, 896),))
    assert plan.key == processor.plan(1, 1, PixelBudget()).key


def test_an_image_without_pixels_is_refused():
    with pytest.raises(InvalidImage, match="at least 1"):
        ours().plan(0, 5, PixelBudget())


@pytest.mark.parametrize(
    ("budget", "param"),
    [
        (PixelBudget(max_pixels=896 * 896 - 1), "max_pixels"),
        (PixelBudget(min_pixels=896 * 896 + 1), "min_pixels"),
    ],
)
def test_bounds_that_exclude_the_only_size_are_refused(budget, param):
    with pytest.raises(InvalidRequest, match="fixed resolution of 802816 pixels") as caught:
        ours().plan(640, 480, budget)
    assert caught.value.param == param
    met = PixelBudget(min_pixels=896 * 896, max_pixels=896 * 896)
    assert ours().plan(640, 480, met) == ours().plan(640, 480, PixelBudget())


def test_everything_that_shapes_pixels_is_in_the_key():
    changes = ({}, SMALL, {"resample": 3}, {"image_mean": 0.1}, {"rescale_factor": 0.1})
    keys = {ours(**change).plan(640, 480, PixelBudget()).key for change in changes}
    assert len(keys) == len(changes)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, UnsupportedModel, "accepted: Gemma3ImageProcessor"),
        ({"do_pan_and_scan": True}, CheckpointError, "do_pan_and_scan is True; accepted: false"),
        ({"do_resize": False}, CheckpointError, "does not resize to a fixed size"),
        ({"size": {"height": 448, "width": 448}}, CheckpointError, "image_size: the processor.* say 448"),
        ({"size": {"shortest_edge": 896}}, CheckpointError, "does not resize to a fixed size"),
        ({"crop_size": 448, "do_center_crop": True}, CheckpointError, "image_size: .* say 448"),
        ({"tile_size": 448}, CheckpointError, "tile_size = 448 would change the pixels"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_refused_settings(change, kind, message):
    with pytest.raises(kind, match=message):
        build("gemma3", {**PUBLISHED, **change}, MODEL)


def test_both_files_must_name_one_number_of_tokens():
    with pytest.raises(CheckpointError, match="image_seq_length: the processor's files say 64"):
        ours({"image_seq_length": 64})
    assert ours({"image_seq_length": 256}).tokens == 256


def test_numbers_of_crops_alone_do_not_turn_pan_and_scan_on():
    crops = {"pan_and_scan_max_num_crops": 4, "pan_and_scan_min_crop_size": 256}
    assert ours(do_pan_and_scan=False, **crops).plan(900, 100, PixelBudget()).tokens == 256
