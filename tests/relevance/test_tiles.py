"""Tiles: regions that cover a picture with its newlines, exact totals, kept tokens and needed tiles."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fovea.relevance.balancing import Tensions
from fovea.relevance.pipeline import realize, survey
from fovea.relevance.policy import Allocation, Cells, Tiling, attend_tiles, kept_tokens, needed_tiles
from fovea.relevance.realizing import whole
from tests.support.thorough import examples

tilings = st.builds(
    Tiling,
    rows=st.integers(1, 24),
    columns=st.integers(1, 24),
    side=st.integers(1, 9),
    top=st.integers(0, 20),
    left=st.integers(0, 20),
    base=st.integers(1, 40),
)
shares = st.floats(0, 1)
seeds = st.integers(0, 99)


def tokens(tiling: Tiling) -> int:
    """Number of tokens of the picture with its newlines."""
    return tiling.rows * (tiling.columns + 1)


def tile_of(tiling: Tiling, row: int, column: int) -> tuple[int, int]:
    """Row and column of a cell's tile. A newline is in the tile of the last cell of its row."""
    column = min(column, tiling.columns - 1)
    return (tiling.top + row) // tiling.side, (tiling.left + column) // tiling.side


def plain(relevance: np.ndarray, content: np.ndarray) -> Cells:
    """Cells that no question is about, and that need full resolution."""
    nothing = np.zeros(relevance.shape, np.float32)
    return Cells(relevance, content, nothing, np.ones(relevance.shape, np.float32))


def maps(tiling: Tiling, seed: int) -> Cells:
    draw = np.random.default_rng(seed)
    shape = tiling.rows, tiling.columns
    return plain(draw.random(shape).astype(np.float32), draw.random(shape) < draw.random())


def allocate_tiles(tiling: Tiling, share: float, seed: int) -> tuple[Allocation, int]:
    total = tiling.base + max(1, round(share * tokens(tiling)))
    return attend_tiles(maps(tiling, seed), total, tiling), total


@given(tilings)
def test_regions_are_tiles_and_cover_the_picture_with_its_newlines(tiling: Tiling) -> None:
    owner = np.full((tiling.rows, tiling.columns + 1), -1)
    for number, region in enumerate(tiling.regions):
        part = owner[region.row : region.row + region.rows, region.column : region.column + region.columns]
        assert part.size == region.tokens > 0
        assert (part == -1).all()
        part[:] = number
    places = {
        (row, column): tile_of(tiling, row, column)
        for row in range(tiling.rows)
        for column in range(tiling.columns + 1)
    }
    order = {place: number for number, place in enumerate(sorted(set(places.values())))}
    assert owner.tolist() == [
        [order[places[row, column]] for column in range(tiling.columns + 1)] for row in range(tiling.rows)
    ]


def test_regions_by_hand() -> None:
    """On tiles of 4x4 cells, the picture begins at a tile's last row and second column."""
    regions = Tiling(rows=3, columns=5, side=4, top=3, left=1, base=16).regions
    assert [(region.row, region.column, region.rows, region.columns) for region in regions] == [
        (0, 0, 1, 3), (0, 3, 1, 3), (1, 0, 2, 3), (1, 3, 2, 3),
    ]  # fmt: skip


@settings(max_examples=examples(200))
@given(tilings, shares, seeds)
def test_totals_are_exact_and_include_the_whole(tiling: Tiling, share: float, seed: int) -> None:
    result, total = allocate_tiles(tiling, share, seed)
    layout = result.layout
    assert layout.tokens == total == tiling.base + sum(result.budgets)
    assert layout.grid == (tiling.rows, tiling.columns + 1)
    assert result.full == tiling.base + tokens(tiling)
    assert result.regions == tiling.regions
    assert all(budget <= region.tokens for budget, region in zip(result.budgets, result.regions, strict=True))
    first, *rest = layout.views
    assert first.region == whole(tiling.rows, tiling.columns + 1)
    assert first.token_indices == tuple(range(tiling.base))
    shown = [
        (region, budget) for region, budget in zip(result.regions, result.budgets, strict=True) if budget
    ]
    assert [(view.region, view.tokens) for view in rest] == shown
    assert all(view.native for view in rest)


@settings(max_examples=examples(200))
@given(tilings, shares, seeds)
def test_kept_tokens_are_ascending_indices_of_all_tokens(tiling: Tiling, share: float, seed: int) -> None:
    result, total = allocate_tiles(tiling, share, seed)
    numbers = kept_tokens(result, tiling)
    assert numbers == sorted(set(numbers))
    assert len(numbers) == total
    assert numbers[: tiling.base] == list(range(tiling.base))
    assert numbers[-1] < tiling.base + tokens(tiling)


@settings(max_examples=examples(200))
@given(tilings, shares, seeds)
def test_each_tile_keeps_its_most_relevant_cells(tiling: Tiling, share: float, seed: int) -> None:
    """The relevance of a newline is the mean of its row."""
    relevance = maps(tiling, seed).relevance
    result, _ = allocate_tiles(tiling, share, seed)
    values = np.concatenate((relevance, relevance.mean(1, keepdims=True)), axis=1)
    mask = np.zeros(values.size, bool)
    mask[np.array(kept_tokens(result, tiling)[tiling.base :]) - tiling.base] = True
    mask = mask.reshape(values.shape)
    for region, budget in zip(result.regions, result.budgets, strict=True):
        part = np.s_[region.row : region.row + region.rows, region.column : region.column + region.columns]
        inside, chosen = values[part], mask[part]
        assert chosen.sum() == budget
        if 0 < budget < region.tokens:
            assert inside[chosen].min() >= inside[~chosen].max()


@settings(max_examples=examples(200))
@given(tilings, shares, seeds)
def test_needed_tiles_are_those_with_kept_cells(tiling: Tiling, share: float, seed: int) -> None:
    """A tile of which only newlines are kept is not needed, because newlines are not encoded."""
    result, _ = allocate_tiles(tiling, share, seed)
    places = sorted(
        {tile_of(tiling, row, column) for row in range(tiling.rows) for column in range(tiling.columns)}
    )
    expected = set()
    for number in kept_tokens(result, tiling)[tiling.base :]:
        row, column = divmod(number - tiling.base, tiling.columns + 1)
        if column < tiling.columns:
            expected.add(places.index(tile_of(tiling, row, column)))
    assert needed_tiles(result, tiling) == sorted(expected)


@given(tilings, seeds)
def test_if_all_cells_are_kept_all_tiles_are_needed(tiling: Tiling, seed: int) -> None:
    result, _ = allocate_tiles(tiling, 1.0, seed)
    assert kept_tokens(result, tiling) == list(range(tiling.base + tokens(tiling)))
    assert needed_tiles(result, tiling) == list(range(len(tiling.regions)))


SQUARE = Tiling(rows=4, columns=4, side=2, top=0, left=0, base=5)
"""Four tiles. Those on the right have two newlines each."""


def test_a_tile_of_which_only_a_newline_is_kept_is_not_needed() -> None:
    """The top left tile is relevant, so the newlines of its rows are, which belong to the top right tile."""
    relevance = np.zeros((4, 4), np.float32)
    relevance[0:2, 0:2] = 1
    result = attend_tiles(plain(relevance, np.ones((4, 4), bool)), SQUARE.base + 4 + 1, SQUARE)
    assert result.budgets == (4, 1, 0, 0)
    assert kept_tokens(result, SQUARE) == [0, 1, 2, 3, 4, 5, 6, 9, 10, 11]
    assert needed_tiles(result, SQUARE) == [0]


def test_the_most_relevant_tile_is_kept_whole_and_blank_cells_come_last() -> None:
    relevance, content = np.full((4, 4), 0.1, np.float32), np.ones((4, 4), bool)
    relevance[2:4, 0:2] = 0.9
    result = attend_tiles(plain(relevance, content), SQUARE.base + 4, SQUARE)
    assert result.budgets == (0, 0, 4, 0)
    assert needed_tiles(result, SQUARE) == [2]
    content[2:4, 0:2] = False
    relevance[0:2] = 0.5
    blank = attend_tiles(plain(relevance, content), SQUARE.base + 4 + 6, SQUARE)
    assert blank.demands == (4, 6, 0, 6)
    assert blank.budgets == (4, 6, 0, 0)


@pytest.mark.parametrize("total", [-1, 0, 4, 5])
def test_totals_that_leave_nothing_beside_the_whole_are_refused(total: int) -> None:
    with pytest.raises(ValueError, match=f"{total} tokens are not more than the 5 of the view of the whole"):
        attend_tiles(plain(np.ones((4, 4), np.float32), np.ones((4, 4), bool)), total, SQUARE)


@given(tilings, shares, seeds)
def test_a_choice_does_not_depend_on_other_images(tiling: Tiling, share: float, seed: int) -> None:
    alone, _ = allocate_tiles(tiling, share, seed)
    allocate_tiles(SQUARE, 0.5, seed)
    assert allocate_tiles(tiling, share, seed)[0] == alone


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_explanation_of_tiles_lies_in_the_image_and_adds_up(share: float) -> None:
    """Newlines count among the tokens, but are in no box."""
    pixels = np.full((60, 100, 3), 240, np.uint8)
    pixels[20:40, 50:90:3] = 10
    image_survey = survey(pixels, 10)
    tiling = Tiling(6, 10, side=4, top=1, left=1, base=16)
    total = 16 + round(share * 66)
    realization = realize(
        image_survey, np.eye(4, dtype=np.float32), total, tensions=Tensions(0.2, 0.8, 0.8),
        choose=lambda cells, total: attend_tiles(cells, total, tiling),
    )  # fmt: skip
    explanation = json.loads(json.dumps(realization.explanation()))
    assert explanation["tokens"] == total <= explanation["of"] == 16 + 66
    assert explanation["thumbnail_tokens"] == 16
    assert sum(region["tokens"] for region in explanation["regions"]) == total - 16
    assert sum(region["of"] for region in explanation["regions"]) == 66
    area = 0.0
    for region in explanation["regions"]:
        left, top, right, bottom = region["box"]
        assert 0 <= left < right <= 1
        assert 0 <= top < bottom <= 1
        area += (right - left) * (bottom - top)
        assert region["lod"] == float(region["tokens"] > 0)
    assert area == pytest.approx(1, abs=2e-3)
