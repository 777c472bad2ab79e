"""Tests of the processor of Idefics3 and SmolVLM against Hugging Face's PIL processors and prompt texts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.thorough import others_slow
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from fovea.core.errors import CheckpointError, InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.engine.vision.processor import build

IDEFICS: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_pad": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Idefics3ImageProcessor",
    "max_image_size": {"longest_edge": 364},
    "resample": 1,
    "size": {"longest_edge": 1456},
}
IDEFICS_MODEL = {"scale_factor": 2, "vision_config": {"image_size": 364, "patch_size": 14}}
SMOL: dict[str, Any] = {
    **IDEFICS,
    "image_processor_type": "SmolVLMImageProcessor",
    "max_image_size": {"longest_edge": 512},
    "size": {"longest_edge": 2048},
    "video_sampling": {"fps": 1, "max_frames": 64},
}
SMOL_MODEL = {
    "scale_factor": 4,
    "vision_config": {"model_type": "smolvlm_vision", "image_size": 512, "patch_size": 16},
}
KINDS: dict[str, Any] = {
    "idefics3": (IDEFICS, IDEFICS_MODEL, {"image_seq_len": 169}, Idefics3ImageProcessorPil),
    "smolvlm": (SMOL, SMOL_MODEL, {"image_seq_len": 64}, SmolVLMImageProcessorPil),
}
SIZES = [
    (1, 1), (3, 2), (364, 364), (365, 363), (512, 512),
    (640, 480), (481, 641), (1456, 1456), (2048, 300), (97, 1003),
    (1500, 9), (1, 400), (1999, 1301),
]  # fmt: skip
QUICK = {"idefics3": ((1, 1), (365, 363), (481, 641), (97, 1003)), "smolvlm": ((2048, 300), (1500, 9))}
"""Sizes of the default run. The two kinds share all code but the text of the prompt."""


def their_text(kind: str, tokens: int, rows: int, columns: int) -> str:
    if kind == "smolvlm":
        return get_image_prompt_string(
            rows, columns, tokens, "<fake_token_around_image>", "<image>", "<global-img>"
        )
    stub = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
        image_token="<image>",
        image_seq_len=tokens,
    )
    return Idefics3Processor.replace_image_token(stub, {"rows": [[rows]], "cols": [[columns]]}, 0)


def options(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in config.items() if key not in ("image_processor_type", "video_sampling")
    }


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, id=f"{kind}-{size[0]}x{size[1]}", marks=[] if quick else pytest.mark.slow)
        for kind in KINDS
        for size in SIZES
        for quick in [size in QUICK[kind]]
    ],
)
def test_bit_exact(kind, size, make_image, reference, run):
    config, model, processor, their_class = KINDS[kind]
    image = make_image(*size)
    result = run(build(kind, config, model, processor), image)
    expected = reference(their_class(**options(config)), image, return_row_col_info=True)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"][0])
    assert np.array_equal(result.arrays["pixel_attention_mask"], expected["pixel_attention_mask"][0])
    rows, columns = expected["rows"][0][0], expected["cols"][0][0]
    assert result.plan.grid == (1, rows, columns)
    assert result.plan.text == their_text(kind, processor["image_seq_len"], rows, columns)
    assert result.plan.tokens == result.plan.text.count("<image>")
    assert result.plan.tokens == len(result.arrays["pixel_values"]) * processor["image_seq_len"]


@pytest.mark.parametrize(
    "change",
    [
        {"do_image_splitting": False},
        {"do_resize": False},
        {"do_resize": False, "do_image_splitting": False},
        {"size": {"height": 500, "width": 300}},
        {"size": {"longest_edge": 364}},
        {"size": {"longest_edge": 700}},
        {"resample": 3},
        {"do_rescale": False},
        {"max_image_size": {"longest_edge": 182}},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", others_slow([(300, 411), (800, 130)], [(300, 411)]), ids=str)
def test_settings_are_honoured(change, size, make_image, reference, run):
    config = {**IDEFICS, **change}
    image = make_image(*size)
    result = run(build("idefics3", config, IDEFICS_MODEL), image)
    expected = reference(Idefics3ImageProcessorPil(**options(config)), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"][0])


def test_the_mask_does_not_depend_on_do_pad(make_image, run):
    result = run(build("idefics3", {**IDEFICS, "do_pad": False}, IDEFICS_MODEL), make_image(9, 9))
    assert result.arrays["pixel_attention_mask"].all()


@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([1456, 2048, 700, 5000]))
def test_resizes_equal_theirs(width, height, edge):
    """Sizes equal those of Hugging Face's code for images, run on shapes alone.

    Their separate estimate, `get_number_of_image_patches`, differs if the longest edge is no multiple of the
    tile.
    """
    config = {**IDEFICS, "size": {"longest_edge": edge}}
    plan = build("idefics3", config, IDEFICS_MODEL).plan(width, height, PixelBudget())
    theirs = ShapesOnly(**options(config))
    resized = theirs.resize(Shape(height, width), SimpleNamespace(longest_edge=edge))
    whole = theirs.resize_for_vision_encoder(resized, 364)
    assert plan.sizes == (resized.shape[-2:], whole.shape[-2:])


class Shape:
    """An array that only has a shape."""

    def __init__(self, height: int, width: int) -> None:
        self.shape = (3, height, width)


class ShapesOnly(Idefics3ImageProcessorPil):
    """Hugging Face's processor without pixels: a resize only changes the shape."""

    def resize(self, image: Any, size: Any, resample: Any = None, **_: Any) -> Any:
        from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

        if size.longest_edge:
            return Shape(*get_resize_output_image_size(image, size.longest_edge))
        return Shape(size.height, size.width)


def test_low_is_the_global_view_alone(make_image, reference, run):
    config, model, processor, their_class = KINDS["smolvlm"]
    image = make_image(640, 481)
    result = run(build("smolvlm", config, model, processor), image, PixelBudget(detail="low"))
    expected = reference(their_class(**{**options(config), "do_image_splitting": False}), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"][0])
    assert result.plan.tokens == 64
    assert result.plan.grid == (1, 0, 0)
    assert result.plan.text == their_text("smolvlm", 64, 0, 0)


def test_medium_is_a_longest_edge_in_between(make_image, reference, run):
    config, model, processor, their_class = KINDS["smolvlm"]
    image = make_image(640, 481)
    result = run(build("smolvlm", config, model, processor), image, PixelBudget(detail="medium"))
    edge = math.isqrt(512 * config["size"]["longest_edge"])
    expected = reference(their_class(**{**options(config), "size": {"longest_edge": edge}}), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"][0])
    whole = build("smolvlm", config, model, processor).plan(640, 481, PixelBudget())
    assert 64 < result.plan.tokens < whole.tokens


def test_pixels_of_a_budget_equal_theirs_at_a_lower_longest_edge(make_image, reference, run):
    config, model, processor, their_class = KINDS["smolvlm"]
    image = make_image(640, 481)
    result = run(build("smolvlm", config, model, processor), image, PixelBudget(max_pixels=1_100_000))
    expected = reference(their_class(**{**options(config), "size": {"longest_edge": 1024}}), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"][0])
    assert result.plan.grid == (1, 2, 2)


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(512 * 512, 20_000_000))
def test_max_pixels_is_never_exceeded(width, height, most):
    processor = build("smolvlm", SMOL, SMOL_MODEL)
    plan = processor.plan(width, height, PixelBudget(max_pixels=most))
    auto = processor.plan(width, height, PixelBudget())
    assert plan.sizes[1][0] * plan.sizes[1][1] <= most
    assert plan.tokens <= auto.tokens
    if auto.sizes[1][0] * auto.sizes[1][1] <= most:
        assert plan == auto
    assert auto == processor.plan(width, height, PixelBudget(detail="high"))


@pytest.mark.parametrize(
    ("budget", "param", "message"),
    [
        (PixelBudget(max_pixels=512 * 512 - 1), "max_pixels", "262144"),
        (PixelBudget(min_pixels=2048 * 2048 + 1), "min_pixels", "4194304"),
        (PixelBudget(min_pixels=300_000, max_pixels=1_000_000), "min_pixels", "262144"),
    ],
    ids=str,
)
def test_bad_budgets(budget, param, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        build("smolvlm", SMOL, SMOL_MODEL).plan(900, 900, budget)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("config", "processor"),
    [
        ({"size": {"shortest_edge": 300}}, {}),
        ({"max_image_size": {"height": 364, "width": 364}}, {}),
        ({"do_center_crop": True}, {}),
        ({}, {"image_seq_len": 64}),
    ],
    ids=str,
)
def test_bad_checkpoints(config, processor):
    with pytest.raises(CheckpointError):
        build("idefics3", {**IDEFICS, **config}, IDEFICS_MODEL, processor)


def test_other_processor_classes_are_refused():
    with pytest.raises(UnsupportedModel):
        build("idefics3", {**IDEFICS, "image_processor_type": "Idefics2ImageProcessor"}, IDEFICS_MODEL)
