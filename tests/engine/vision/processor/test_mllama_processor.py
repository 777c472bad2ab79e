"""Tests of Llama 3.2 Vision's image processor against Hugging Face's PIL processor.

The reference is the PIL class. Published checkpoints name the class that uses torchvision, which resizes with
torch's bilinear filter.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.thorough import others_slow
from transformers.models.mllama.image_processing_pil_mllama import (
    MllamaImageProcessorPil,
    get_all_supported_aspect_ratios,
    get_image_size_fit_to_canvas,
    get_optimal_tiled_canvas,
)
from transformers.models.mllama.processing_mllama import MllamaProcessor

from fovea.core.errors import CheckpointError, InvalidImage, InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.mllama import best_grid, grids_of, size_on_canvas
from fovea.engine.visual_budget.choose import possible_methods

PUBLISHED: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "MllamaImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_image_tiles": 4,
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 112, "width": 112},
}
"""preprocessor_config.json as in published checkpoints, whose tiles have an edge of 560 pixels."""
MODEL: dict[str, Any] = {"vision_config": {"image_size": 112, "patch_size": 14, "max_num_tiles": 4}}
TILE, AREA = 112, 112 * 112
TILE_STATES = 8 * 8 + 1
SIZES = [
    (1, 1), (3, 2), (112, 112), (113, 111), (111, 113), (224, 112), (160, 120), (120, 161), (448, 112),
    (112, 448), (336, 225), (97, 1003), (600, 75), (1500, 9), (1, 400), (400, 1), (225, 475), (1900, 1100),
]  # fmt: skip
QUICK = ((1, 1), (113, 111), (120, 161), (97, 1003))
"""Sizes of the default run: the smallest, a side beside a limit, a usual one, and a long one."""


def theirs(config: dict[str, Any] = PUBLISHED) -> Any:
    return MllamaImageProcessorPil(**{k: v for k, v in config.items() if k != "image_processor_type"})


def ours(**changes: Any) -> Any:
    return build("mllama", {**PUBLISHED, **changes}, MODEL)


def expect_equal(result: Any, expected: Any) -> None:
    """Check pixels, padding, mask, number of rows, and aspect ratio id against one image of the reference."""
    pixels, tiles = result.arrays["pixel_values"], expected["num_tiles"][0][0]
    assert pixels.shape[0] == tiles == result.plan.grid[1] * result.plan.grid[2]
    padded = np.zeros_like(expected["pixel_values"][0, 0])
    padded[:tiles] = pixels
    assert np.array_equal(padded, expected["pixel_values"][0, 0])
    mask = np.arange(padded.shape[0]) < tiles
    assert np.array_equal(mask, expected["aspect_ratio_mask"][0, 0])
    assert np.array_equal(result.arrays["aspect_ratio_ids"], expected["aspect_ratio_ids"][0])
    assert result.plan.states == tiles * TILE_STATES


@pytest.mark.parametrize("size", others_slow(SIZES, QUICK), ids=lambda size: "x".join(map(str, size)))
def test_bit_exact(size, make_image, reference, run):
    image = make_image(*size)
    result = run(ours(), image)
    expect_equal(result, reference(theirs(), image))
    stub = SimpleNamespace(image_token="<|image|>")
    assert result.plan.text == MllamaProcessor.replace_image_token(stub, {}, 0)
    assert result.plan.tokens == 1


@pytest.mark.parametrize(
    "change",
    [
        {"max_image_tiles": 1},
        {"max_image_tiles": 6},
        {"resample": 3},
        {"do_normalize": False},
        {"do_rescale": False},
        {"image_mean": None, "image_std": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", others_slow([(300, 411), (900, 130)], [(300, 411)]), ids=str)
def test_settings_are_honoured(change, size, make_image, reference, run):
    config, image = {**PUBLISHED, **change}, make_image(*size)
    model = {"vision_config": {**MODEL["vision_config"], "max_num_tiles": config["max_image_tiles"]}}
    given_settings = {name: value for name, value in config.items() if value is not None}
    result = run(build("mllama", config, model), image)
    expect_equal(result, reference(theirs(given_settings), image))


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 9), st.integers(1, 600))
def test_grids_and_sizes_equal_theirs(width, height, most, tile):
    grids = grids_of(most)
    assert list(grids) == get_all_supported_aspect_ratios(most)
    rows, columns = best_grid(height, width, tile, grids)
    canvas = rows * tile, columns * tile
    assert canvas == get_optimal_tiled_canvas(height, width, most, tile)
    expected = get_image_size_fit_to_canvas(height, width, *canvas, tile)
    assert size_on_canvas(height, width, canvas, (tile, tile)) == expected


def test_the_published_size_of_tiles():
    """A tile of 560 pixels has 1601 rows, which are those of 40 x 40 patches and a class token."""
    vision = {"image_size": 560, "patch_size": 14, "max_num_tiles": 4}
    processor = build(
        "mllama", {**PUBLISHED, "size": {"height": 560, "width": 560}}, {"vision_config": vision}
    )
    plan = processor.plan(1120, 600, PixelBudget())
    assert (plan.grid, plan.tokens, plan.states) == ((1, 2, 2), 1, 4 * 1601)


@pytest.mark.parametrize("size", [(300, 411), (3, 5), (900, 130)], ids=str)
def test_low_is_one_tile(size, make_image, reference, run):
    image = make_image(*size)
    result = run(ours(), image, PixelBudget(detail="low"))
    expect_equal(result, reference(theirs({**PUBLISHED, "max_image_tiles": 1}), image))
    assert result.plan.grid == (1, 1, 1)


def test_fewer_tiles_keep_the_ids_of_the_model(make_image, reference, run):
    """Transformers numbers the grids among those of its own limit; the model's table has those of 4 tiles."""
    image = make_image(120, 300)
    result = run(ours(), image, PixelBudget(detail="medium"))
    expected = reference(theirs({**PUBLISHED, "max_image_tiles": 2}), image)
    assert np.array_equal(result.arrays["pixel_values"], expected["pixel_values"][0, 0])
    assert result.plan.grid == (1, 2, 1)
    full = reference(theirs(), make_image(112, 224))
    assert np.array_equal(result.arrays["aspect_ratio_ids"], full["aspect_ratio_ids"][0])
    assert result.plan.key != ours().plan(120, 300, PixelBudget()).key


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(AREA, 8 * AREA))
def test_max_pixels_is_never_exceeded(width, height, most):
    plan = ours().plan(width, height, PixelBudget(max_pixels=most))
    auto = ours().plan(width, height, PixelBudget())
    assert plan.grid[1] * plan.grid[2] * AREA <= most
    if most >= 4 * AREA:
        assert plan == auto
    assert auto == ours().plan(width, height, PixelBudget(detail="high"))


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 4 * AREA))
def test_min_pixels_is_met_and_enlarges_the_picture(width, height, least):
    plan = ours().plan(width, height, PixelBudget(min_pixels=least))
    _, rows, columns = plan.grid
    assert rows * columns * AREA >= least
    auto = ours().plan(width, height, PixelBudget())
    if auto.grid[1] * auto.grid[2] * AREA >= least:
        assert plan == auto
        return
    (tall, wide), canvas = plan.sizes[0], (rows * TILE, columns * TILE)
    assert tall == canvas[0] or wide == canvas[1]
    assert 1 <= tall <= canvas[0]
    assert 1 <= wide <= canvas[1]
    assert tall * wide >= auto.sizes[0][0] * auto.sizes[0][1]


def test_an_enlarged_picture_has_pixels_to_the_edge_of_its_canvas(make_image, run):
    result = run(ours(), make_image(30, 30), PixelBudget(min_pixels=4 * AREA))
    assert result.plan.grid == (1, 2, 2)
    assert result.plan.sizes == ((224, 224),)
    black = (0 - np.array(PUBLISHED["image_mean"])) / np.array(PUBLISHED["image_std"])
    last = result.arrays["pixel_values"][3, :, -1, -1]
    assert not np.allclose(last, black, atol=0.1)


@pytest.mark.parametrize(
    ("budget", "param", "message"),
    [
        (PixelBudget(max_pixels=AREA - 1), "max_pixels", "accepts 12544"),
        (PixelBudget(min_pixels=4 * AREA + 1), "min_pixels", "at most 4 tiles"),
        (PixelBudget(min_pixels=2 * AREA + 1, max_pixels=3 * AREA - 1), "min_pixels", "at most 2 tiles"),
    ],
    ids=str,
)
def test_bad_budgets(budget, param, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        ours().plan(900, 900, budget)
    assert caught.value.param == param


def test_an_image_without_pixels_is_refused():
    with pytest.raises(InvalidImage, match="0x5"):
        ours().plan(0, 5, PixelBudget())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"size": {"shortest_edge": 112}}, "height and width"),
        ({"size": {"height": 112, "width": 224}}, "of equal value"),
        ({"size": {"height": 224, "width": 224}}, "the model's config says 112"),
        ({"do_resize": False}, "do_resize is False"),
        ({"do_pad": False}, "do_pad is False"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"max_image_tiles": 2}, "max_image_tiles: the processor's files say 2"),
        ({"max_image_tiles": 0}, "max_image_tiles is 0"),
        ({"max_image_tiles": 10**9}, "to 64"),
    ],
    ids=str,
)
def test_bad_checkpoints(config, message):
    with pytest.raises(CheckpointError, match=message):
        ours(**config)


def test_other_tables_of_aspect_ratios_are_refused():
    grids = [list(grid) for grid in grids_of(4)]
    vision = MODEL["vision_config"]
    build("mllama", PUBLISHED, {"vision_config": {**vision, "supported_aspect_ratios": grids}})
    with pytest.raises(CheckpointError, match=r"config.json: supported_aspect_ratios is \[\[4, 1\]"):
        build("mllama", PUBLISHED, {"vision_config": {**vision, "supported_aspect_ratios": grids[::-1]}})


def test_other_processor_classes_are_refused():
    with pytest.raises(UnsupportedModel, match="SiglipImageProcessor"):
        build("mllama", {"image_processor_type": "SiglipImageProcessor"}, MODEL)


def test_no_visual_token_can_be_left_out():
    assert possible_methods(ours().capabilities) == ()
