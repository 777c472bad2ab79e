"""Tests of the processor of Gemma 4 against Hugging Face's pixels, positions and texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.reference import skip_before
from tests.support.thorough import others_slow
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from fovea.core.errors import CheckpointError, InvalidImage, InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.gemma4 import BUDGETS, Gemma4Processor

CONFIG: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": False,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.0, 0.0, 0.0],
    "image_processor_type": "Gemma4ImageProcessor",
    "image_seq_length": 280,
    "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 280,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": None,
}
MODEL = {"vision_config": {"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240}}
SIZES = [
    (1, 1), (3, 2), (48, 48), (47, 49), (1, 400), (9000, 9),
    (640, 480), (477, 1023), (768, 768), (3100, 40), (816, 768),
]  # fmt: skip
QUICK = ((1, 1), (47, 49), (477, 1023), (3100, 40))
"""Sizes of the default run: the smallest, a side beside a limit, a usual one, and a long one."""
edges = st.integers(1, 9000)


def ours(**changes: Any) -> Gemma4Processor:
    built = build("gemma4", {**CONFIG, **changes}, MODEL)
    assert isinstance(built, Gemma4Processor)
    return built


def theirs(**changes: Any) -> Gemma4ImageProcessorPil:
    known = {**CONFIG, **changes}
    del known["image_processor_type"]
    return Gemma4ImageProcessorPil(**{name: value for name, value in known.items() if value is not None})


def their_text(tokens: int) -> str:
    skip_before("5.21", "needs torchvision to import Gemma4Processor")
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor as TheirProcessor

    stub = SimpleNamespace(boi_token="<|image>", eoi_token="<image|>", image_token="<|image|>")
    counts = {"num_soft_tokens_per_image": [tokens]}
    return TheirProcessor.replace_image_token(stub, counts, 0)  # type: ignore[arg-type]


def assert_same(result: Any, expected: Any) -> None:
    """Patches, their number and their positions must be equal. Theirs has padding behind the patches."""
    pixels, (_, rows, columns) = result.arrays["pixel_values"], result.plan.grid
    assert np.array_equal(pixels, expected["pixel_values"][0, : len(pixels)])
    positions = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(-1, 2)
    assert np.array_equal(positions, expected["image_position_ids"][0, : len(pixels)])
    assert (expected["image_position_ids"][0, len(pixels) :] == -1).all()
    assert result.plan.tokens == expected["num_soft_tokens_per_image"][0]
    assert result.plan.text == their_text(result.plan.tokens)


@pytest.mark.parametrize("size", others_slow(SIZES, QUICK), ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("tokens", [70, 280])
def test_bit_exact(tokens, size, make_image, reference, run):
    image = make_image(*size)
    result = run(ours(max_soft_tokens=tokens), image)
    assert_same(result, reference(theirs(max_soft_tokens=tokens), image))


@pytest.mark.parametrize(
    "change",
    [
        {"resample": 0},
        {"resample": 2},
        {"do_rescale": False},
        {"do_normalize": True, "image_mean": 0.4, "image_std": [0.3, 0.2, 0.1]},
        {"image_mean": 0.4, "image_std": 0.3},
        {"do_normalize": None, "image_mean": 0.4},
        {"rescale_factor": 1 / 127.5},
        {"max_soft_tokens": 140},
        pytest.param({"max_soft_tokens": 1120}, marks=pytest.mark.slow),
        {"size": {"height": 224, "width": 224}},
    ],
    ids=str,
)
def test_settings_are_honoured(change, make_image, reference, run):
    image = make_image(301, 203)
    assert_same(run(ours(**change), image), reference(theirs(**change), image))


def test_other_shapes_of_patches(make_image, reference, run):
    image, shape = make_image(301, 203), {"patch_size": 8, "pooling_kernel_size": 2}
    model = {"vision_config": shape}
    for settings in ({**CONFIG, **shape}, {**CONFIG, "patch_size": None, "pooling_kernel_size": None}):
        assert_same(run(build("gemma4", settings, model), image), reference(theirs(**shape), image))


@given(edges, edges, st.sampled_from(BUDGETS))
def test_sizes_equal_theirs(width, height, tokens):
    plan = ours(max_soft_tokens=tokens).plan(width, height, PixelBudget())
    size = get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
    assert plan.sizes == (size,)
    assert plan.tokens == plan.text.count("<|image|>") == size[0] * size[1] // 48**2
    assert 1 <= plan.tokens <= tokens


@pytest.mark.parametrize(
    ("own", "low", "medium"), [(70, 70, 70), (140, 70, 70), (280, 70, 140), (560, 70, 140), (1120, 70, 280)]
)
@given(width=edges, height=edges)
def test_levels_are_budgets_of_the_family(own, low, medium, width, height):
    processor = ours(max_soft_tokens=own)
    for level, tokens in (("low", low), ("medium", medium), ("high", own), ("auto", own)):
        plan = processor.plan(width, height, PixelBudget(detail=level))
        assert plan == ours(max_soft_tokens=tokens).plan(width, height, PixelBudget())


@given(edges, edges, st.integers(1, 3_000_000), st.sampled_from(BUDGETS))
def test_max_pixels_chooses_the_largest_budget_that_fits(width, height, most, own):
    def area(tokens: int) -> int:
        ((down, across),) = ours(max_soft_tokens=tokens).plan(width, height, PixelBudget()).sizes
        return down * across

    processor, budget = ours(max_soft_tokens=own), PixelBudget(max_pixels=most)
    fitting = [tokens for tokens in BUDGETS if tokens <= own and area(tokens) <= most]
    if not fitting:
        with pytest.raises(InvalidRequest, match=f"at {area(70)} pixels or more") as caught:
            processor.plan(width, height, budget)
        assert caught.value.param == "max_pixels"
        return
    expected = ours(max_soft_tokens=fitting[-1]).plan(width, height, PixelBudget())
    assert processor.plan(width, height, budget) == expected


@given(edges, edges, st.integers(1, 3_000_000))
def test_min_pixels_chooses_the_smallest_budget_from_the_own_one_on(width, height, least):
    areas = {}
    for tokens in BUDGETS:
        ((down, across),) = ours(max_soft_tokens=tokens).plan(width, height, PixelBudget()).sizes
        areas[tokens] = down * across
    budget = PixelBudget(min_pixels=least)
    if areas[1120] < least:
        with pytest.raises(InvalidRequest, match=f"at {areas[1120]} pixels or fewer") as caught:
            ours().plan(width, height, budget)
        assert caught.value.param == "min_pixels"
        return
    tokens = next(tokens for tokens in BUDGETS if tokens >= 280 and areas[tokens] >= least)
    expected = ours(max_soft_tokens=tokens).plan(width, height, PixelBudget())
    assert ours().plan(width, height, budget) == expected


@pytest.mark.parametrize(
    ("budget", "param", "message"),
    [
        (PixelBudget(max_pixels=100_000), "max_pixels", "at 145152 pixels or more"),
        (PixelBudget(max_pixels=0), "max_pixels", "positive"),
        (PixelBudget(min_pixels=3_000_000), "min_pixels", "at 2451456 pixels or fewer"),
        (PixelBudget(min_pixels=400_000, max_pixels=500_000), "min_pixels", "at 299520 pixels, or at 612864"),
        (
            PixelBudget(min_pixels=700_000, max_pixels=800_000),
            "min_pixels",
            "at 612864 pixels, or at 1244160",
        ),
        (PixelBudget(min_pixels=2000, max_pixels=1000), "min_pixels", "above max_pixels"),
        (PixelBudget(detail="middling"), "detail", "auto, low, medium, high"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_bad_budgets(budget, param, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        ours().plan(640, 480, budget)
    assert caught.value.param == param


def test_both_bounds_can_be_met_by_a_smaller_budget_than_the_own_one():
    plan = ours().plan(640, 480, PixelBudget(min_pixels=250_000, max_pixels=300_000))
    assert plan.sizes[0][0] * plan.sizes[0][1] == 299_520


def test_budgets_end_where_the_encoder_has_no_positions():
    model = {"vision_config": {**MODEL["vision_config"], "position_embedding_size": 3 * 560}}
    processor = build("gemma4", CONFIG, model)
    assert processor.plan(640, 480, PixelBudget(min_pixels=1_000_000)).tokens == 540
    with pytest.raises(InvalidRequest, match="at 1244160 pixels or fewer"):
        processor.plan(640, 480, PixelBudget(min_pixels=1_300_000))
    with pytest.raises(CheckpointError, match="max_soft_tokens is 1120; accepted: up to 560"):
        build("gemma4", {**CONFIG, "max_soft_tokens": 1120}, model)


@given(edges, edges, st.integers(1, 900))
def test_a_smaller_plan_has_at_most_so_many_tokens(width, height, most):
    processor = ours()
    plan = processor.plan(width, height, PixelBudget())
    smaller = processor.shrink(plan, PixelBudget(), most)
    assert 1 <= smaller.tokens <= most
    assert (smaller is plan) == (plan.tokens <= most)


def test_pixels_of_a_smaller_plan(make_image):
    image, processor = make_image(301, 203), ours()
    plan = processor.plan(301, 203, PixelBudget())
    smaller = processor.shrink(plan, PixelBudget(), 10)
    assert smaller.sizes == ((96, 144),)
    assert processor.process(image, smaller).arrays["pixel_values"].shape == (54, 768)


def test_without_resize():
    processor = ours(do_resize=False)
    assert processor.plan(96, 144, PixelBudget()).sizes == ((144, 96),)
    with pytest.raises(InvalidImage, match="multiples of 48"):
        processor.plan(100, 48, PixelBudget())
    with pytest.raises(InvalidImage, match="which are 289 tokens.*accepts 280"):
        processor.plan(48 * 17, 48 * 17, PixelBudget())
    with pytest.raises(InvalidRequest, match="does not resize") as caught:
        processor.plan(96, 144, PixelBudget(max_pixels=13_000))
    assert caught.value.param == "max_pixels"
    with pytest.raises(InvalidRequest, match="does not resize") as caught:
        processor.plan(96, 144, PixelBudget(min_pixels=14_000))
    assert caught.value.param == "min_pixels"
    assert processor.capabilities.resize is None


def test_an_image_without_pixels_is_refused():
    with pytest.raises(InvalidImage):
        ours().plan(0, 5, PixelBudget())


def test_keys_name_what_shapes_the_pixels():
    plans = [
        processor.plan(640, 480, PixelBudget())
        for processor in (
            ours(),
            ours(resample=2),
            ours(rescale_factor=0.1),
            ours(max_soft_tokens=140),
            build("gemma4", {**CONFIG, "patch_size": 24, "pooling_kernel_size": 2}, {}),
        )
    ]
    assert len({plan.key for plan in plans}) == len(plans)


def test_names_of_the_tokens_may_be_in_the_files():
    names = {"image_token": "<i>", "boi_token": "<b>", "eoi_token": "<e>"}
    plan = build("gemma4", CONFIG, MODEL, names).plan(1, 70, PixelBudget(detail="low"))
    assert plan.text == f"<b>{'<i>' * 70}<e>"
    assert plan.text_of(2) == "<b><i><i><e>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_soft_tokens": 256}, "max_soft_tokens is 256; accepted: one of 70, 140, 280, 560, 1120"),
        ({"patch_size": 14}, "patch_size"),
        ({"pooling_kernel_size": 2}, "pooling_kernel_size"),
        ({"do_center_crop": True}, "do_center_crop = True would change the pixels"),
        ({"resample": 9}, "resample is 9"),
    ],
    ids=str,
)
def test_settings_that_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        ours(**change)


def test_another_class_is_refused():
    with pytest.raises(UnsupportedModel, match="Gemma3ImageProcessor"):
        ours(image_processor_type="Gemma3ImageProcessor")
