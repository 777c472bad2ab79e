"""Tests of MiniCPM-V 4.6's processor against Hugging Face's PIL processor and prompt text.

The reference is the PIL class of the processor. Where torchvision is installed, transformers prefers its
torchvision class, which computes the same sizes and resizes with torch's bicubic filter for bytes.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.reference import skip_before_mode_4x
from tests.support.thorough import others_slow
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from fovea.core.errors import CheckpointError, InvalidImage, InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.minicpmv4_6 import nearest_grid
from fovea.engine.vision.processor.pixels import Palette
from fovea.engine.vision.processor.sizes import nested_coordinates
from fovea.kernels.native.pictures import Order

HALF = [0.5, 0.5, 0.5]
PUBLISHED: dict[str, Any] = {
    "image_processor_type": "MiniCPMV4_6ImageProcessor",
    "processor_class": "MiniCPMV4_6Processor",
    "max_slice_nums": 9,
    "scale_resolution": 448,
    "patch_size": 14,
    "use_image_id": True,
    "slice_mode": True,
    "image_mean": HALF,
    "image_std": HALF,
}
"""preprocessor_config.json as in the published checkpoint."""
MODEL: dict[str, Any] = {"vision_config": {"image_size": 980, "patch_size": 14}}
PAD = "<|image_pad|>"
SIZES = [
    (1, 1), (3, 2), (200, 1), (1, 200), (448, 448), (449, 447), (448, 449), (640, 480), (481, 641),
    (1344, 900), (97, 1003), (2400, 300), (3000, 16), (900, 1900), (1500, 1500),
]  # fmt: skip
QUICK = ((1, 1), (449, 447), (481, 641), (97, 1003))
"""Sizes of the default run: the smallest, a side beside a limit, a usual one, and a long one."""


def theirs(**changes: Any) -> Any:
    config = {**PUBLISHED, **changes}
    return MiniCPMV4_6ImageProcessorPil(
        **{k: v for k, v in config.items() if k not in ("image_processor_type", "processor_class")}
    )


def ours(**changes: Any) -> Any:
    model = {**MODEL, "downsample_mode": changes.get("downsample_mode", "16x")}
    return build("minicpmv4_6", {**PUBLISHED, **changes}, model)


def their_text(output: Any, divisor: int = 16, *, tiles: bool = True) -> str:
    stub = SimpleNamespace(
        image_start_token="<image>", image_end_token="</image>", image_token=PAD,
        slice_start_token="<slice>", slice_end_token="</slice>", slice_mode=tiles,
    )  # fmt: skip
    text: str = MiniCPMV4_6Processor.replace_image_token(stub, output, 0, image_token_divisor=divisor)
    return text


def by_patch(output: Any, patch: int = 14) -> list[np.ndarray[Any, Any]]:
    """Their pixels, (patches, values) of every picture, with the patches of a picture row by row."""
    strip = output["pixel_values"][0]
    patches = strip.reshape(3, patch, -1, patch).transpose(2, 0, 1, 3).reshape(-1, 3 * patch * patch)
    ends = np.cumsum([rows * columns for rows, columns in output["target_sizes"]])
    return np.split(patches, ends[:-1])


def in_nested_order(patches: Any, rows: int, columns: int, merges: int) -> Any:
    """Reorder the patches of a picture, square by square, one merge at a time from the last one."""
    numbers = np.arange(rows * columns).reshape(rows, columns)

    def visit(block: Any) -> list[int]:
        if block.shape == (1, 1):
            return [int(block[0, 0])]
        half = block.shape[0] // 2
        quarters = (block[top : top + half, left : left + half] for top in (0, half) for left in (0, half))
        return [number for quarter in quarters for number in visit(quarter)]

    side = 2**merges
    order = []
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            order += visit(numbers[top : top + side, left : left + side])
    return patches[order]


def assert_equal_pixels(result: Any, expected: Any, merges: int = 2) -> None:
    found = list(result.arrays["pixel_values"]) + list(result.arrays.get("tiles", ()))
    pictures = by_patch(expected)
    assert len(found) == len(pictures)
    for mine, their, grid in zip(found, pictures, expected["target_sizes"], strict=True):
        assert np.array_equal(mine, in_nested_order(their, *grid, merges))


@pytest.mark.parametrize("size", others_slow(SIZES, QUICK), ids=lambda size: "x".join(map(str, size)))
def test_bit_exact(size, make_image, reference, run):
    image = make_image(*size)
    result, expected = run(ours(), image), reference(theirs(), image)
    assert_equal_pixels(result, expected)
    assert result.plan.text == their_text(expected)
    assert result.plan.tokens == result.plan.text.count(PAD)
    grid = expected["grids"][0]
    assert result.plan.grid == (1, *grid)
    assert len(result.arrays.get("tiles", ())) == math.prod(grid)


@pytest.mark.parametrize(
    "change",
    [
        {"max_slice_nums": 1},
        {"max_slice_nums": 2},
        {"max_slice_nums": 25},
        {"scale_resolution": 224},
        {"scale_resolution": 100},
        {"slice_mode": False},
        {"downsample_mode": "4x"},
        {"resample": 2},
        {"do_normalize": False},
        {"do_rescale": False},
        {"image_mean": [0.4, 0.5, 0.6]},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", others_slow([(300, 411), (900, 430)], [(300, 411)]), ids=str)
def test_settings_are_honoured(change, size, make_image, reference, run):
    image = make_image(*size)
    small = change.get("downsample_mode") == "4x"
    if small:
        skip_before_mode_4x()
    result, expected = run(ours(**change), image), reference(theirs(**change), image)
    assert_equal_pixels(result, expected, 1 if small else 2)
    tiles = change.get("slice_mode", True)
    assert result.plan.text == their_text(expected, 4 if small else 16, tiles=tiles)
    assert result.plan.tokens == result.plan.text.count(PAD)


@given(st.integers(1, 6000), st.integers(1, 6000), st.integers(2, 40))
def test_the_grid_is_that_of_the_reference(height, width, most):
    expected = theirs().get_sliced_grid((height, width), most, 448)
    count = min(math.ceil(width * height / (448 * 448)), most)
    found = nearest_grid(height, width, count, most) if count > 1 else None
    assert found == (None if expected is None else tuple(expected))


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from(["4x", "16x"]))
def test_the_sizes_are_those_of_the_reference(height, width, mode):
    skip_before_mode_4x()
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidImage, match="200 times"):
            ours(downsample_mode=mode).plan(width, height, PixelBudget())
        return
    plan, judge = ours(downsample_mode=mode).plan(width, height, PixelBudget()), theirs()
    grid = judge.get_sliced_grid((height, width), 9, 448)
    view = judge.find_best_resize((height, width), 448, 14, mode, allow_upscale=grid is None)
    sizes = (
        [view] if grid is None else [view, judge.get_refine_size((height, width), grid, 448, 14, mode, True)]
    )
    assert plan.sizes == tuple(sizes)
    side = 28 if mode == "4x" else 56
    assert plan.tokens == sum(map(math.prod, sizes)) // side**2


@pytest.mark.parametrize("merges", [1, 2])
def test_patches_are_in_the_order_of_their_coordinates(merges):
    rows, columns = 8, 12
    numbers = np.arange(rows * columns, dtype=np.uint8).reshape(rows, columns)
    pixels = np.repeat(np.repeat(numbers, 3, axis=0), 3, axis=1)[:, :, None].repeat(3, axis=2)
    palette = Palette("", (0, 0, 0), np.arange(256, dtype=np.float32) * np.ones((3, 1), np.float32))
    coordinates = nested_coordinates((rows, columns), merges)
    patches = palette.patches([pixels], Order(coordinates * 3, 3, 3))
    assert np.array_equal(patches[:, 0], coordinates @ [columns, 1])
    assert np.array_equal(patches[:, 0], in_nested_order(numbers.ravel(), rows, columns, merges))
    assert (patches == patches[:, :1]).all()


def test_images_are_numbered():
    stub = SimpleNamespace(image_id_start_token="<image_id>", image_id_end_token="</image_id>")
    plan = ours().plan(640, 480, PixelBudget())
    prompt = f"{PAD} and {PAD} and {PAD}"
    expected = MiniCPMV4_6Processor._prepend_local_ids(stub, [prompt], [plan.text] * 3, PAD)
    assert [plan.text_at(place) for place in range(3)] == expected
    plain = ours(use_image_id=False).plan(640, 480, PixelBudget())
    assert plain.text_at(2) == plain.text == plan.text
    joint = build("minicpmv4_6", PUBLISHED, MODEL, {"use_image_id": False})
    assert joint.plan(640, 480, PixelBudget()).text_at(2) == plan.text


def test_levels_are_those_of_fewer_tiles(make_image, reference, run):
    image, processor = make_image(1300, 1000), ours()
    for level, most in (("low", 1), ("medium", 3), ("high", 9), ("auto", 9)):
        result = run(processor, image, PixelBudget(level))
        assert_equal_pixels(result, reference(theirs(max_slice_nums=most), image))
    tokens = {
        level: processor.plan(1300, 1000, PixelBudget(level)).tokens for level in ("low", "medium", "high")
    }
    assert tokens["low"] < tokens["medium"] < tokens["high"]


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3_000_000))
def test_max_pixels_bounds_the_tiles_and_a_view_without_tiles(height, width, most):
    if max(height, width) > 200 * min(height, width):
        return
    processor, budget = ours(), PixelBudget(max_pixels=most)
    if most < 56 * 56:
        with pytest.raises(InvalidRequest, match=r"3136 \(one token\) or more") as caught:
            processor.plan(width, height, budget)
        assert caught.value.param == "max_pixels"
        return
    plan, full = processor.plan(width, height, budget), processor.plan(width, height, PixelBudget())
    assert math.prod(plan.sizes[-1]) <= most
    assert plan.grid[1] * plan.grid[2] <= full.grid[1] * full.grid[2]
    if math.prod(full.sizes[-1]) <= most:
        assert plan == full


def test_min_pixels_takes_more_tiles(make_image, run):
    processor = ours()
    assert processor.plan(300, 300, PixelBudget()).sizes == ((448, 448),)
    plan = processor.plan(300, 300, PixelBudget(min_pixels=500_000))
    assert plan.grid[1] * plan.grid[2] >= 3
    assert math.prod(plan.sizes[-1]) >= 500_000
    assert plan.sizes[0] == (280, 280), "beside tiles, a small picture is not enlarged"
    run(processor, make_image(300, 300), PixelBudget(min_pixels=500_000))
    with pytest.raises(InvalidRequest, match=r"encodes this image at \d+ pixels at most") as caught:
        processor.plan(300, 300, PixelBudget(min_pixels=5_000_000))
    assert caught.value.param == "min_pixels"
    with pytest.raises(InvalidRequest, match="min_pixels"):
        processor.plan(300, 300, PixelBudget(min_pixels=210_000, max_pixels=220_000))


def test_everything_that_shapes_pixels_is_in_the_key():
    keys = [ours().plan(640, 480, PixelBudget()).key]
    changes = (
        {"max_slice_nums": 1}, {"scale_resolution": 336}, {"resample": 2}, {"image_mean": 0.1},
        {"rescale_factor": 0.1}, {"downsample_mode": "4x"},
    )  # fmt: skip
    keys += [ours(**change).plan(640, 480, PixelBudget()).key for change in changes]
    keys.append(ours().plan(640, 480, PixelBudget(max_pixels=60_000)).key)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"image_processor_type": "CLIPImageProcessor"},
            UnsupportedModel,
            "accepted: MiniCPMV4_6ImageProcessor",
        ),
        ({"patch_size": 16}, CheckpointError, "patch_size: the processor's files say 16"),
        ({"do_resize": False}, CheckpointError, "do_resize is False; accepted: true"),
        ({"max_slice_nums": 0}, CheckpointError, "max_slice_nums is 0; accepted: a positive integer"),
        (
            {"max_slice_nums": 5000},
            CheckpointError,
            "max_slice_nums is 5000; accepted: integers from 1 to 1024",
        ),
        ({"downsample_mode": "8x"}, CheckpointError, "downsample_mode is '8x'; accepted: 4x, 16x"),
        ({"crop_size": 448}, CheckpointError, "crop_size = 448 would change the pixels"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_settings(change, kind, message):
    with pytest.raises(kind, match=message):
        build("minicpmv4_6", {**PUBLISHED, **change}, {**MODEL})


def test_both_files_must_name_one_downsample_mode():
    with pytest.raises(CheckpointError, match="files say 4x, the model's config says 16x"):
        build("minicpmv4_6", {**PUBLISHED, "downsample_mode": "4x"}, MODEL)
    with pytest.raises(CheckpointError, match="files say 16x, the model's config says 4x"):
        build("minicpmv4_6", PUBLISHED, {**MODEL, "downsample_mode": "4x"})
