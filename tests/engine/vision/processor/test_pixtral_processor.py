"""Tests of the processors of Pixtral, Mistral 3 and LightOnOCR against Hugging Face's pixels and texts."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.thorough import examples, others_slow
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)

from fovea.core.errors import CheckpointError, InvalidImage, InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.pixtral import PixtralProcessor

NORM: dict[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
PIXTRAL: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": {"height": 16, "width": 16},
    "processor_class": "PixtralProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 1024},
    **NORM,
}
MISTRAL: dict[str, Any] = {
    **PIXTRAL,
    "crop_size": None,
    "do_center_crop": None,
    "image_processor_type": "PixtralImageProcessorFast",
    "patch_size": 14,
    "size": {"longest_edge": 1540},
}
TOWER = {"vision_config": {"model_type": "pixtral", "patch_size": 14}, "spatial_merge_size": 2}
KINDS: dict[str, Any] = {
    # model_type, preprocessor_config.json, config.json, processor_config.json, patch_size of theirs, merge
    "pixtral": (
        "llava", PIXTRAL, {"vision_config": {"model_type": "pixtral", "patch_size": 16}},
        {"patch_size": 16, "image_token": "[IMG]"}, 16, 1,
    ),
    "mistral3": ("mistral3", MISTRAL, TOWER, {"patch_size": 14, "spatial_merge_size": 2}, 28, 2),
    "lighton_ocr": ("lighton_ocr", MISTRAL, TOWER, {"patch_size": 14, "spatial_merge_size": 2}, 14, 2),
    "lighton_ocr by 28": ("lighton_ocr", {**MISTRAL, "patch_size": 28}, TOWER, {}, 28, 2),
    "lighton_ocr by 16": ("lighton_ocr", {**MISTRAL, "patch_size": None}, TOWER, {}, 16, 2),
}  # fmt: skip
SIZES = [
    (1, 1), (3, 2), (27, 29), (28, 28), (56, 84),
    (1, 400), (1540, 9), (640, 480), (477, 1023), (97, 1603),
    (3100, 40), (1541, 1540),
]  # fmt: skip
QUICK = ((1, 1), (27, 29), (477, 1023), (1, 400), (97, 1603))
"""Sizes of the default run: the smallest, a side beside a limit, a usual one, and a long one."""


def ours(kind: str, **changes: Any) -> PixtralProcessor:
    model_type, config, model, processor, _, _ = KINDS[kind]
    built = build(model_type, {**config, **changes}, model, processor)
    assert isinstance(built, PixtralProcessor)
    return built


def theirs(kind: str, **changes: Any) -> PixtralImageProcessorPil:
    """Hugging Face's processor, with the `patch_size` that their processor class passes to it."""
    _, config, _, _, step, _ = KINDS[kind]
    known = {**config, "patch_size": step, **changes}
    known.pop("image_processor_type")
    return PixtralImageProcessorPil(**{name: value for name, value in known.items() if value is not None})


@cache
def expansion(module: str, owner: str) -> Callable[..., str]:
    """The method of a Hugging Face processor class that writes the text of an image.

    Its code is taken out of the file, because to import the file of Pixtral needs torchvision.
    """
    path = Path(transformers.__file__).parent / "models" / module / f"processing_{module}.py"
    classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    method = next(
        node for node in classes[owner].body if getattr(node, "name", None) == "replace_image_token"
    )
    names: dict[str, Any] = {}
    exec(compile(ast.Module([method], []), str(path), "exec"), names)
    return names["replace_image_token"]  # type: ignore[no-any-return]


def their_text(kind: str, size: tuple[int, int]) -> str:
    """The prompt text of an image of (height, width) after resizing, by Hugging Face's processor classes."""
    patch, merge = KINDS[kind][2]["vision_config"]["patch_size"], KINDS[kind][5]
    sizes = {"image_sizes": [size]}
    if kind.startswith("lighton_ocr"):
        stub = SimpleNamespace(effective_patch_size=patch * merge, image_token="<|image_pad|>")
        return expansion("lighton_ocr", "LightOnOcrProcessor")(stub, sizes, 0)
    stub = SimpleNamespace(
        patch_size=patch,
        spatial_merge_size=merge,
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    return expansion("pixtral", "PixtralProcessor")(stub, sizes, 0)


def picture_of(patches: Any, grid: tuple[int, int, int], patch: int) -> Any:
    """Put patches (rows * columns, 3 * patch * patch) together: (3, rows * patch, columns * patch)."""
    _, rows, columns = grid
    squares = patches.reshape(rows, columns, 3, patch, patch)
    return squares.transpose(2, 0, 3, 1, 4).reshape(3, rows * patch, columns * patch)


def assert_same_pixels(processor: PixtralProcessor, result: Any, expected: Any) -> None:
    """Pixels must be equal. Their model, too, leaves out the pixels beyond the last whole patch."""
    picture = picture_of(result.arrays["pixel_values"], result.plan.grid, processor.patch)
    pixels = expected["pixel_values"][0]
    assert result.plan.sizes == (pixels.shape[1:],)
    assert picture.shape[1] == pixels.shape[1] // processor.patch * processor.patch
    assert picture.shape[2] == pixels.shape[2] // processor.patch * processor.patch
    assert np.array_equal(picture, pixels[:, : picture.shape[1], : picture.shape[2]])


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, id=f"{kind}-{size[0]}x{size[1]}", marks=[] if quick else pytest.mark.slow)
        for kind in KINDS
        for size in SIZES
        for quick in [size in (QUICK[2:4] if " by " in kind else QUICK)]
    ],
)
def test_bit_exact(kind, size, make_image, reference, run):
    image = make_image(*size)
    processor = ours(kind)
    result = run(processor, image)
    expected_size = get_resize_output_image_size(
        np.empty((3, image.height, image.width), np.uint8), KINDS[kind][1]["size"]["longest_edge"],
        KINDS[kind][4], "channels_first",
    )  # fmt: skip
    if min(expected_size) < processor.factor:
        # Theirs makes an image without a visual token.
        assert "<|image_pad|>" not in their_text(kind, expected_size)
        assert min(result.plan.sizes[0]) == processor.least_edge
        assert result.plan.tokens >= 1
        return
    expected = reference(theirs(kind), image)
    assert_same_pixels(processor, result, expected)
    assert tuple(expected["image_sizes"][0]) == result.plan.sizes[0]
    assert result.plan.text == their_text(kind, result.plan.sizes[0])
    assert result.plan.tokens == result.plan.text.count(processor.marker)


@pytest.mark.parametrize(
    "change",
    [
        {"resample": 0},
        {"resample": 2},
        {"do_rescale": False},
        {"do_normalize": False},
        {"rescale_factor": 1 / 127.5},
        {"image_mean": 0.4, "image_std": 0.3},
        {"size": {"longest_edge": 300}},
        {"size": {"height": 120, "width": 333}},
        {"size": 200},
        {"size": None},
        {"do_pad": False},
        {"do_resize": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", others_slow([(301, 203), (150, 1131)], [(301, 203)]), ids=str)
@pytest.mark.parametrize("kind", ["pixtral", "mistral3"])
def test_settings_are_honoured(kind, change, size, make_image, reference, run):
    image = make_image(*size)
    processor = ours(kind, **change)
    assert_same_pixels(processor, run(processor, image), reference(theirs(kind, **change), image))


@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from(sorted(KINDS)))
def test_sizes_equal_theirs(width, height, kind):
    processor = ours(kind)
    _, config, _, _, step, _ = KINDS[kind]
    picture = SimpleNamespace(shape=(3, height, width))
    expected = get_resize_output_image_size(picture, config["size"]["longest_edge"], step, "channels_first")
    plan = processor.plan(width, height, PixelBudget())
    if min(expected) >= processor.factor:
        assert plan.sizes == (expected,)
    else:
        assert plan.sizes == (tuple(max(edge, processor.least_edge) for edge in expected),)
    assert plan.tokens == plan.text.count(processor.marker) >= 1
    assert plan == processor.plan(width, height, PixelBudget(detail="high"))


@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from(sorted(KINDS)))
def test_levels_are_at_most_64_and_256_tokens(width, height, kind):
    processor = ours(kind)
    low, medium, high = (
        processor.plan(width, height, PixelBudget(detail=level)) for level in ("low", "medium", "high")
    )
    assert low.tokens <= 64
    assert low.tokens <= medium.tokens <= 256
    assert medium.tokens <= high.tokens
    for level, most in ((low, 64), (medium, 256)):
        if high.tokens <= most:
            assert level == high


@settings(max_examples=examples(300))
@given(
    st.integers(1, 5000), st.integers(1, 5000), st.integers(1024, 3_000_000), st.sampled_from(sorted(KINDS))
)
def test_max_pixels_is_never_exceeded_and_the_longest_edge_is_the_largest_possible(width, height, most, kind):
    processor = ours(kind)
    plan = processor.plan(width, height, PixelBudget(max_pixels=most))
    whole = processor.plan(width, height, PixelBudget())
    area = plan.sizes[0][0] * plan.sizes[0][1]
    assert processor.least_edge**2 <= area <= most
    if whole.sizes[0][0] * whole.sizes[0][1] <= most:
        assert plan == whole
        return
    larger = [
        processor._resized(height, width, edge) for edge in range(1, min(max(height, width), 1540) + 1, 7)
    ]
    assert not [size for size in larger if area < size[0] * size[1] <= most]


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_of_a_budget_equal_theirs_at_a_lower_longest_edge(kind, make_image, reference, run):
    image, processor = make_image(640, 481), ours(kind)
    for budget in (PixelBudget(max_pixels=60_000), PixelBudget(detail="low"), PixelBudget(detail="medium")):
        result = run(processor, image, budget)
        edges = [
            edge
            for edge in range(1, 1024)
            if processor._resized(image.height, image.width, edge) == result.plan.sizes[0]
        ]
        expected = reference(theirs(kind, size={"longest_edge": edges[-1]}), image)
        assert_same_pixels(processor, result, expected)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 1_000_000), st.sampled_from(sorted(KINDS)))
def test_min_pixels_is_met_or_refused_with_the_largest_size(width, height, least, kind):
    processor = ours(kind)
    whole = processor.plan(width, height, PixelBudget())
    budget = PixelBudget(min_pixels=least)
    assert processor.limit is not None
    tallest, widest = processor._resized(height, width, max(processor.limit), enlarges=True)
    if tallest * widest < least:
        with pytest.raises(InvalidRequest, match=f"at {tallest * widest} pixels or less") as caught:
            processor.plan(width, height, budget)
        assert caught.value.param == "min_pixels"
        return
    plan = processor.plan(width, height, budget)
    assert tallest * widest >= plan.sizes[0][0] * plan.sizes[0][1] >= least
    if whole.sizes[0][0] * whole.sizes[0][1] >= least:
        assert plan == whole


def test_min_pixels_enlarges_in_proportion():
    plan = ours("mistral3").plan(300, 200, PixelBudget(min_pixels=600_000))
    assert plan.sizes == ((644, 952),)
    both = PixelBudget(min_pixels=600_000, max_pixels=620_000)
    assert ours("mistral3").plan(300, 200, both).sizes == ((644, 952),)


@pytest.mark.parametrize(
    ("budget", "param", "message"),
    [
        (PixelBudget(max_pixels=783), "max_pixels", "784 or more"),
        (PixelBudget(max_pixels=0), "max_pixels", "positive"),
        (PixelBudget(min_pixels=3_000_000), "min_pixels", "at 1811040 pixels or less"),
        (PixelBudget(min_pixels=600_000, max_pixels=600_001), "min_pixels", "at 602112 pixels, or at fewer"),
        (PixelBudget(min_pixels=2000, max_pixels=1000), "min_pixels", "above max_pixels"),
        (PixelBudget(detail="middling"), "detail", "auto, low, medium, high"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_bad_budgets(budget, param, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        ours("mistral3").plan(640, 480, budget)
    assert caught.value.param == param


def test_without_resize():
    processor = ours("mistral3", do_resize=False)
    plan = processor.plan(100, 60, PixelBudget())
    assert (plan.sizes, plan.grid, plan.tokens) == (((60, 100),), (1, 4, 7), 6)
    with pytest.raises(InvalidImage, match="at least 28 pixels"):
        processor.plan(100, 27, PixelBudget())
    with pytest.raises(InvalidRequest, match="does not resize") as caught:
        processor.plan(100, 60, PixelBudget(max_pixels=5999))
    assert caught.value.param == "max_pixels"
    with pytest.raises(InvalidRequest, match="does not resize") as caught:
        processor.plan(100, 60, PixelBudget(min_pixels=6001))
    assert caught.value.param == "min_pixels"


def test_an_image_without_pixels_is_refused():
    with pytest.raises(InvalidImage):
        ours("pixtral").plan(0, 5, PixelBudget())


@pytest.mark.parametrize("kind", ["lighton_ocr by 28", "mistral3", "pixtral"])
@given(width=st.integers(1, 4000), height=st.integers(1, 4000), most=st.integers(1, 900))
def test_a_smaller_plan_has_as_many_tokens_as_fit(kind, width, height, most):
    processor = ours(kind)
    plan = processor.plan(width, height, PixelBudget())
    smaller = processor.shrink(plan, PixelBudget(), most)
    assert 1 <= smaller.tokens <= max(most, 1)
    assert (smaller is plan) == (plan.tokens <= most)


def test_capabilities():
    """LightOnOCR has no text between its tokens. It makes images smaller if it resizes to whole tokens."""
    assert not ours("pixtral").capabilities.droppable
    assert not ours("mistral3").capabilities.droppable
    by_14, by_28 = ours("lighton_ocr").capabilities, ours("lighton_ocr by 28").capabilities
    assert by_14.droppable
    assert by_14.resize is None
    assert by_28.droppable
    assert by_28.resize is not None
    assert ours("lighton_ocr by 28", do_resize=False).capabilities.resize is None


def test_texts_of_the_checkpoint():
    texts = {"image_token": "<i>", "image_break_token": "<b>", "image_end_token": "<e>"}
    model_type, config, model, _, _, _ = KINDS["mistral3"]
    plan = build(model_type, config, model, texts).plan(84, 56, PixelBudget())
    assert plan.text == "<i><i><i><b><i><i><i><e>"


@pytest.mark.parametrize(
    ("kind", "config", "model", "processor", "param"),
    [
        ("mistral3", {"size": {"shortest_edge": 300}}, {}, {}, "size"),
        ("mistral3", {"do_center_crop": True}, {}, {}, "do_center_crop"),
        ("mistral3", {"max_image_tiles": 4}, {}, {}, "max_image_tiles"),
        ("mistral3", {}, {}, {"patch_size": 16}, "patch_size"),
        ("mistral3", {}, {}, {"spatial_merge_size": 1}, "spatial_merge_size"),
        ("mistral3", {}, {"vision_config": {"patch_size": [14, 14]}}, {}, "patch_size"),
        ("mistral3", {}, {"spatial_merge_size": 0}, {}, "spatial_merge_size"),
        ("lighton_ocr", {"patch_size": {"height": 14, "width": 28}}, {}, {}, "patch_size"),
        ("lighton_ocr", {"patch_size": {"longest_edge": 14}}, {}, {}, "patch_size"),
        ("lighton_ocr", {"patch_size": 29}, {}, {}, "patch_size"),
    ],
    ids=str,
)
def test_bad_checkpoints(kind, config, model, processor, param):
    with pytest.raises(CheckpointError) as caught:
        build(kind, {**MISTRAL, **config}, {**TOWER, **model}, processor)
    assert caught.value.param == param


def test_other_processor_classes_are_refused():
    with pytest.raises(UnsupportedModel, match="accepted: PixtralImageProcessor"):
        build("mistral3", {**MISTRAL, "image_processor_type": "CLIPImageProcessor"}, TOWER)


def test_a_llava_with_another_tower_is_still_llava():
    clip = {"vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}}
    sizes = {"crop_size": 336, "size": {"shortest_edge": 336}}
    assert build("llava", sizes, clip).plan(640, 480, PixelBudget()).tokens == 576
