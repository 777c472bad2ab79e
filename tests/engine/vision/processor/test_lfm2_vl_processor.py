"""Tests of LFM2-VL's processor against Hugging Face's class, whose resize is torch's `interpolate` for bytes.

Grids, sizes, tokens and text are equal. Some values differ by one level of 256, and a few in ten thousand by
two, because torch rounds the weights of its filter more, and both round to bytes between rows and columns.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support import lfm2_reference as reference
from tests.support.thorough import others_slow

from fovea.core.errors import CheckpointError, InvalidImage, InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.engine.vision.processor import build

HALF = [0.5, 0.5, 0.5]
PUBLISHED: dict[str, Any] = {
    "image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 16, "downsample_factor": 2,
    "do_image_splitting": True, "min_image_tokens": 64, "max_image_tokens": 256, "tile_size": 512,
    "min_tiles": 2, "max_tiles": 10, "max_pixels_tolerance": 2.0, "use_thumbnail": True, "resample": 2,
    "do_resize": True, "do_pad": True, "image_mean": HALF, "image_std": HALF,
}  # fmt: skip
"""preprocessor_config.json as in the published checkpoints."""
SMALL = {
    "encoder_patch_size": 8, "min_image_tokens": 4, "max_image_tokens": 16, "tile_size": 64, "max_tiles": 6,
}  # fmt: skip
"""Small tiles, so that many tests are quick."""
MODEL: dict[str, Any] = {"vision_config": {"patch_size": 16}, "downsample_factor": 2}
SIZES = [
    (1, 1), (3, 2), (200, 1), (1, 200), (33, 47), (256, 256), (512, 512), (640, 480), (481, 641), (724, 724),
    (725, 725), (1024, 1024), (1344, 900), (97, 1003), (2400, 300), (3000, 16), (900, 1900), (1500, 1500),
]  # fmt: skip
QUICK = ((1, 1), (512, 512), (725, 725), (481, 641), (97, 1003))
"""Sizes of the default run: the smallest, a side beside a limit, a usual one, and a long one."""
SMALL_SIZES = [
    (1, 1), (5, 3), (60, 60), (64, 64), (91, 90), (130, 90), (60, 200), (231, 57), (129, 128), (400, 390),
    (8, 240), (640, 480),
]  # fmt: skip


def settings(**changes: Any) -> dict[str, Any]:
    return {**PUBLISHED, **changes}


def theirs(image: Any, **changes: Any) -> dict[str, Any]:
    return reference.run(image, **settings(**changes))


def ours(names: bool = True, **changes: Any) -> Any:
    config = settings(**changes)
    model = {"vision_config": {"patch_size": config["encoder_patch_size"]}, "downsample_factor": 2}
    return build("lfm2_vl", config, model, {"use_image_special_tokens": names})


def assert_equal_images(result: Any, expected: dict[str, Any], deviation: float = 0.5) -> None:
    """Pictures are equal in number and shape, and nearly in pixels. deviation: std of all channels."""
    found = [*result.arrays.get("tiles", ()), *result.arrays.get("pixel_values", ())]
    wanted = reference.pictures(expected)
    assert [picture.shape for picture in found] == [picture.shape for picture in wanted]
    level = 1 / 255 / deviation
    for mine, their in zip(found, wanted, strict=True):
        difference = np.abs(mine - their)
        assert difference.max() < 2.01 * level
        assert (difference > 1.5 * level).mean() < 0.001
        assert (difference > 0.5 * level).mean() < 0.1


def assert_equal_text(plan: Any, expected: dict[str, Any], names: bool = True, **changes: Any) -> None:
    assert plan.text == reference.text(expected, names=names, **settings(**changes))
    assert plan.tokens == plan.text.count("<image>")
    rows, columns = expected["image_rows"][0], expected["image_cols"][0]
    assert (max(1, plan.grid[1]), max(1, plan.grid[2])) == (rows, columns)


def check(make_image: Any, run: Any, size: tuple[int, int], **changes: Any) -> None:
    image = make_image(*size)
    result, expected = run(ours(**changes), image), theirs(image, **changes)
    assert_equal_images(result, expected)
    assert_equal_text(result.plan, expected, **changes)


@pytest.mark.parametrize("size", others_slow(SIZES, QUICK), ids=lambda size: "x".join(map(str, size)))
def test_published_settings(size, make_image, run):
    check(make_image, run, size)


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("size", SMALL_SIZES, ids=lambda size: "x".join(map(str, size)))
def test_small_tiles(size, resample, make_image, run):
    check(make_image, run, size, **SMALL, resample=resample)


@pytest.mark.parametrize(
    "change",
    [
        {"do_image_splitting": False},
        {"min_tiles": 1, "max_tiles": 1},
        {"min_tiles": 3},
        {"min_tiles": 4, "max_tiles": 4},
        {"max_pixels_tolerance": 1.0},
        {"max_pixels_tolerance": 6.5},
        {"min_image_tokens": 12},
        {"max_image_tokens": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "size", [(300, 411), pytest.param((90, 43), marks=pytest.mark.slow), (20, 300)], ids=str
)
def test_settings_are_honoured(change, size, make_image, run):
    check(make_image, run, size, **{**SMALL, **change})


def test_tiles_without_a_view_of_the_whole(make_image, run):
    image, changes = make_image(300, 200), {**SMALL, "use_thumbnail": False}
    processor = ours(**changes)
    plan = processor.plan(300, 200, PixelBudget())
    result, expected = processor.process(image, plan), theirs(image, **changes)
    assert set(result.arrays) == {"tiles"}
    assert_equal_images(result, expected)
    assert_equal_text(plan, expected, **changes)


@pytest.mark.parametrize("size", [(300, 200), (60, 50)], ids=str)
def test_a_prompt_without_names_of_tiles(size, make_image):
    plan = ours(names=False, **SMALL).plan(*size, PixelBudget())
    assert_equal_text(plan, theirs(make_image(*size), **SMALL), names=False, **SMALL)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(2, 5), st.integers(5, 14))
def test_sizes_and_grids_are_those_of_the_reference(width, height, least, most):
    processor, judge = ours(min_tiles=least, max_tiles=most), reference.PROCESSOR_CLASS()
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidImage, match="200 times"):
            processor.plan(width, height, PixelBudget())
        return
    plan = processor.plan(width, height, PixelBudget())
    new_width, new_height = judge.smart_resize(height, width, 2, 64, 256, 16)
    assert plan.sizes[-1] == (new_height, new_width)
    if judge._is_image_too_large(height, width, 256, 16, 2, 2.0):
        columns, rows, *_ = judge._get_grid_layout(height, width, least, most, 512)
        assert plan.grid == (1, rows, columns)
        assert plan.sizes[0] == (512 * rows, 512 * columns)
    else:
        assert plan.grid == (1, 0, 0)


def test_levels_bound_the_tokens(make_image, run):
    image, processor = make_image(1300, 1000), ours()
    low, medium, high = (
        run(processor, image, PixelBudget(level)).plan for level in ("low", "medium", "high")
    )
    assert low.tokens <= 64 < medium.tokens <= 256 < high.tokens
    assert low.grid == medium.grid == (1, 0, 0)
    assert_equal_images(run(processor, image, PixelBudget("medium")), theirs(image, do_image_splitting=False))


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3_000_000))
def test_max_pixels_bounds_tiles_and_view(width, height, most):
    if max(height, width) > 200 * min(height, width):
        return
    processor, budget = ours(), PixelBudget(max_pixels=most)
    if most < 32 * 32:
        with pytest.raises(InvalidRequest, match=r"1024 \(one token\) or more") as caught:
            processor.plan(width, height, budget)
        assert caught.value.param == "max_pixels"
        return
    plan = processor.plan(width, height, budget)
    assert all(math.prod(size) <= most for size in plan.sizes)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 400_000) | st.integers(1, 3_000_000))
@example(2000, 1000, 10_000_000)
def test_min_pixels_is_met_or_refused(width, height, least):
    """It had no effect on pictures in tiles, however large it was."""
    if max(height, width) > 20 * min(height, width):
        return
    processor = ours()
    budget, tiled = PixelBudget(min_pixels=least), processor.plan(width, height, PixelBudget()).grid[1]
    most = 10 * 512 * 512 if tiled else 256 * 32 * 32
    if least > most:
        with pytest.raises(InvalidRequest, match=f"{most} pixels at most") as caught:
            processor.plan(width, height, budget)
        assert caught.value.param == "min_pixels"
        return
    assert max(map(math.prod, processor.plan(width, height, budget).sizes)) >= least


def test_everything_that_shapes_pixels_is_in_the_key():
    keys = [ours().plan(1640, 1480, PixelBudget()).key]
    changes = (
        {"max_tiles": 4}, {"tile_size": 256}, {"resample": 3}, {"image_mean": 0.1}, {"rescale_factor": 0.1},
        {"max_image_tokens": 200}, {"use_thumbnail": False}, {"encoder_patch_size": 32},
    )  # fmt: skip
    keys += [ours(**change).plan(1640, 1480, PixelBudget()).key for change in changes]
    keys.append(ours().plan(1640, 1480, PixelBudget(max_pixels=60_000)).key)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, UnsupportedModel, "accepted: Lfm2VlImageProcessor"),
        ({"encoder_patch_size": 14}, CheckpointError, "encoder_patch_size: the processor's files say 14"),
        ({"downsample_factor": 4}, CheckpointError, "downsample_factor: the processor's files say 4"),
        ({"min_image_tokens": 300}, CheckpointError, "min_image_tokens 300 to max_image_tokens 256"),
        ({"min_tiles": 11}, CheckpointError, "min_tiles 11 to max_tiles 10"),
        ({"min_tiles": 1}, CheckpointError, "min_tiles is 1; accepted: 2 or more, or 1 with max_tiles 1"),
        ({"tile_size": 500}, CheckpointError, "tile_size is 500; accepted: a multiple of 32"),
        ({"crop_size": 448}, CheckpointError, "crop_size = 448 would change the pixels"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_settings(change, kind, message):
    with pytest.raises(kind, match=message):
        build("lfm2_vl", settings(**change), MODEL)
