"""Tests of DeepSeek-OCR 2's processor against Hugging Face's PIL processor and prompt text.

Checkpoints may name its torchvision class, which resizes with torch. Fovea's pixels are those of the PIL
class.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.reference import skip_before
from tests.support.thorough import others_slow
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from transformers.models.deepseek_ocr2.processing_deepseek_ocr2 import DeepseekOcr2Processor

from fovea.core.errors import CheckpointError, InvalidImage, InvalidRequest, UnsupportedModel
from fovea.core.media import Image, PixelBudget, VisualTokens
from fovea.engine.vision.processor import build
from fovea.engine.visual_budget.choose import RequestContext, VisualBudget

PUBLISHED: dict[str, Any] = {
    "background_color": [127, 127, 127],
    "crop_to_patches": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "DeepseekOcr2ImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_patches": 6,
    "min_patches": 2,
    "processor_class": "DeepseekOcr2Processor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 1024, "width": 1024},
    "tile_size": 768,
}
"""The settings that transformers' own class writes."""
MODEL: dict[str, Any] = {"vision_config": {"sam_config": {"patch_size": 16}}}
SIDE: dict[str, Any] = {"patch_size": 16, "downsample_ratio": 4}
TILE, VIEW = 768**2, 1024**2
SMALL: dict[str, Any] = {**PUBLISHED, "size": {"height": 128, "width": 128}, "tile_size": 96}
"""The settings for a model with patches of 2 pixels, whose pictures are small enough for many tests."""
SIZES = [(1, 1), (768, 500), (769, 768), (1700, 2200), (3000, 40)]
SMALL_SIZES = [
    (1, 1), (3, 2), (95, 96), (96, 96), (97, 96), (96, 97), (128, 128), (1, 97), (192, 96), (130, 90),
    (60, 200), (333, 250), (97, 1003), (600, 3), (3, 600), (193, 97),
]  # fmt: skip
OPTIONS = ("background_color", "do_normalize", "do_rescale", "image_mean", "image_std", "max_patches",
           "min_patches", "resample", "rescale_factor", "size", "tile_size")  # fmt: skip


def theirs(config: dict[str, Any] = PUBLISHED, **more: Any) -> Any:
    return DeepseekOcr2ImageProcessorPil(**{n: config[n] for n in OPTIONS if n in config}, **more)


def their_text(tiles: int, config: dict[str, Any] = PUBLISHED, patch: int = 16) -> str:
    skip_before("5.20", "has no function for the text of an image alone")
    stub = SimpleNamespace(
        image_processor=theirs(config), image_token="<image>", patch_size=patch, downsample_ratio=4
    )
    return DeepseekOcr2Processor.replace_image_token(stub, {"num_local_patches": [tiles]}, 0)


def ours(**changes: Any) -> Any:
    return build("deepseek_ocr2", {**PUBLISHED, **changes}, MODEL, SIDE)


def small(**changes: Any) -> Any:
    return build("deepseek_ocr2", {**SMALL, **changes}, {"vision_config": {"sam_config": {"patch_size": 2}}})


def assert_same_pixels(result: Any, expected: Any) -> None:
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"])
    assert ("tiles" in result.arrays) == ("pixel_values_local" in expected)
    if "tiles" in result.arrays:
        assert np.array_equal(result.arrays["tiles"], expected["pixel_values_local"])
    _, rows, columns = result.plan.grid
    assert rows * columns == int(expected["num_local_patches"][0])


@pytest.mark.parametrize(
    "size",
    others_slow(SIZES, [(768, 500), (769, 768)]),
    ids=str,
)
def test_bit_exact(size, make_image, reference, run):
    image = make_image(*size)
    result, expected = run(ours(), image), reference(theirs(), image)
    assert_same_pixels(result, expected)
    assert result.plan.text == their_text(int(expected["num_local_patches"][0]))
    assert result.plan.tokens == result.plan.text.count("<image>")


@pytest.mark.parametrize("size", SMALL_SIZES, ids=str)
def test_bit_exact_over_many_sizes(size, make_image, reference, run):
    image = make_image(*size)
    result, expected = run(small(), image), reference(theirs(SMALL), image)
    assert_same_pixels(result, expected)
    assert result.plan.text == their_text(int(expected["num_local_patches"][0]), SMALL, patch=2)


@given(st.integers(1, 6000), st.integers(1, 6000))
def test_token_counts_equal_theirs(width, height):
    if max(width, height) > 200 * min(width, height):
        return
    tiles = 0
    if max(width, height) > 768:
        tiles = (
            DeepseekOcr2ImageProcessorPil(size={"height": 768, "width": 768}).get_number_of_image_patches(
                height, width
            )
            - 1
        )
    assert ours().plan(width, height, PixelBudget()).text == their_text(tiles)


@pytest.mark.parametrize(
    "change",
    [
        {"max_patches": 9},
        {"min_patches": 1, "max_patches": 1},
        {"min_patches": 3, "max_patches": 3},
        {"background_color": [0, 200, 31]},
        {"resample": 2},
        {"do_normalize": False},
        {"do_rescale": False},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.3, 0.2, 0.1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(300, 411), (50, 90)], ids=str)
def test_settings_are_honoured(change, size, make_image, reference, run):
    image = make_image(*size)
    assert_same_pixels(run(small(**change), image), reference(theirs({**SMALL, **change}), image))


def test_every_setting_that_shapes_the_pixels_is_in_the_key():
    changes: list[dict[str, Any]] = [
        {}, {"background_color": [0, 0, 0]}, {"resample": 2}, {"do_normalize": False}, {"max_patches": 2},
    ]  # fmt: skip
    keys = [ours(**change).plan(1700, 2200, PixelBudget()).key for change in changes]
    assert len(set(keys)) == len(keys)
    plans = [ours().plan(900, 900, PixelBudget(detail=level)) for level in ("low", "medium", "high")]
    assert len({plan.key for plan in plans}) == 3
    assert ours().plan(901, 700, PixelBudget()).key != ours().plan(901, 701, PixelBudget()).key


@pytest.mark.parametrize("size", [(300, 411), (50, 90)], ids=str)
def test_low_is_the_view_at_the_size_of_a_tile(size, make_image, reference, run):
    image = make_image(*size)
    result = run(small(), image, PixelBudget(detail="low"))
    assert_same_pixels(result, reference(theirs(SMALL, crop_to_patches=False), image))
    assert result.plan.tokens == 12 * 12 + 1


def test_medium_is_the_view_alone(make_image, reference, run):
    image = make_image(300, 411)
    result = run(small(), image, PixelBudget(detail="medium"))
    expected = reference(theirs(SMALL), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"])
    assert "tiles" not in result.arrays
    assert result.plan.tokens == 16 * 16 + 1


def area(plan: Any) -> int:
    """Pixels of the tiles; without tiles, of the view."""
    rows, columns = plan.grid[1:]
    return rows * columns * TILE or max(plan.sizes[0]) ** 2


SIDES = st.integers(20, 4000)


@given(SIDES, SIDES, st.integers(TILE, 8 * TILE))
def test_max_pixels_is_never_exceeded(width, height, most):
    plan = ours().plan(width, height, PixelBudget(max_pixels=most))
    auto = ours().plan(width, height, PixelBudget())
    assert area(plan) <= min(most, 6 * TILE)
    if area(auto) <= most:
        assert plan == auto
    assert auto == ours().plan(width, height, PixelBudget(detail="high"))


@given(SIDES, SIDES, st.integers(1, 6 * TILE))
def test_min_pixels_is_met(width, height, least):
    plan = ours().plan(width, height, PixelBudget(min_pixels=least))
    assert area(plan) >= least
    auto = ours().plan(width, height, PixelBudget())
    if least <= min(area(auto), 2 * TILE):
        assert plan == auto


@pytest.mark.parametrize(
    ("budget", "param", "message"),
    [
        (PixelBudget(max_pixels=TILE - 1), "max_pixels", "accepts 589824"),
        (PixelBudget(min_pixels=6 * TILE + 1), "min_pixels", "at 3538944 pixels at most"),
        (PixelBudget(min_pixels=2 * TILE + 1, max_pixels=3 * TILE - 1), "min_pixels", "at 1179648"),
        (PixelBudget(min_pixels=VIEW + 1, max_pixels=2 * TILE - 1), "min_pixels", "at 1048576"),
        (PixelBudget(min_pixels=TILE + 1, max_pixels=VIEW - 1), "min_pixels", "at 589824"),
        (PixelBudget(detail="huge"), "detail", "accepted: "),  # type: ignore[arg-type]
    ],
    ids=str,
)
@pytest.mark.parametrize("edge", [300, 900])
def test_bad_budgets(budget, param, message, edge):
    with pytest.raises(InvalidRequest, match=message) as caught:
        ours().plan(edge, edge, budget)
    assert caught.value.param == param


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (201, 1), (1, 100000)], ids=str)
def test_bad_images(size):
    with pytest.raises(InvalidImage):
        ours().plan(*size, PixelBudget())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"size": {"shortest_edge": 1024}}, "height and width of 1024"),
        ({"size": {"height": 1024, "width": 768}}, "height and width of 1024"),
        ({"size": {"height": 1280, "width": 1280}}, "height and width of 1024"),
        ({"tile_size": 640}, "tile_size is 640; accepted: 768"),
        ({"do_resize": False}, "do_resize is False"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"do_pad": True}, "do_pad"),
        ({"min_patches": 7}, "max_patches is 6"),
        ({"max_patches": 10**9}, "to 1024"),
        ({"background_color": [0, 0, 256]}, "integers from 0 to 255"),
        ({"background_color": [0, 0, 0.5]}, "integers from 0 to 255"),
    ],
    ids=str,
)
def test_bad_checkpoints(config, message):
    with pytest.raises(CheckpointError, match=message):
        ours(**config)


@pytest.mark.parametrize(
    ("model", "side", "message"),
    [
        ({"vision_config": {"sam_config": {"patch_size": 14}}}, {}, "height and width of 896"),
        (MODEL, {"patch_size": 14}, "the model's config says 16"),
        (MODEL, {"downsample_ratio": 2}, "downsample_ratio"),
    ],
    ids=str,
)
def test_contradictions_of_the_model(model, side, message):
    with pytest.raises(CheckpointError, match=message):
        build("deepseek_ocr2", PUBLISHED, model, side)


def test_other_processor_classes_are_refused():
    with pytest.raises(UnsupportedModel, match="SiglipImageProcessor"):
        build("deepseek_ocr2", {"image_processor_type": "SiglipImageProcessor"}, MODEL)


def test_a_reduced_image_keeps_a_quarter_of_its_257_tokens():
    image, wish = Image("an image", 96, 96, bytes(3 * 96 * 96)), VisualTokens("uniform", 0.25)
    budget = PixelBudget("high", visual=wish)
    plan = small().plan(96, 96, budget)
    reduced = VisualBudget(small(), lambda text: [], None).reduce(
        image, plan, budget, RequestContext("what is it?", "", 0.0)
    )
    assert reduced is not None
    assert reduced.plan.tokens == reduced.plan.text.count("<image>") == 65
