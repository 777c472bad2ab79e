"""Tiles: regions that are a picture with its newlines, exact totals, and the numbers of what is kept and encoded."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fovea.relevance.balancing import Balancer, Tensions
from fovea.relevance.pipeline import realize, survey
from fovea.relevance.policy import Allocation
from fovea.relevance.realizing import whole
from fovea.relevance.tiles import Tiling, attend_tiles, kept_tokens, needed_tiles

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
    """Of the picture with its newlines."""
    return tiling.rows * (tiling.columns + 1)


def tile_of(tiling: Tiling, row: int, column: int) -> tuple[int, int]:
    """A cell's tile on the canvas; a newline is in the tile of the last cell of its row."""
    column = min(column, tiling.columns - 1)
    return (tiling.top + row) // tiling.side, (tiling.left + column) // tiling.side


def maps(tiling: Tiling, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    shape = tiling.rows, tiling.columns
    return draw.random(shape).astype(np.float32), draw.random(shape) < draw.random()


def allocation(tiling: Tiling, share: float, seed: int) -> tuple[Allocation, int]:
    total = tiling.base + max(1, round(share * tokens(tiling)))
    return attend_tiles(*maps(tiling, seed), total, tiling), total


@given(tilings)
def test_regions_are_tiles_and_tile_the_picture_with_its_newlines(tiling: Tiling) -> None:
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
    """Three rows from the last of a tile on, and five columns from the second of a tile on, on tiles of four."""
    regions = Tiling(rows=3, columns=5, side=4, top=3, left=1, base=16).regions
    assert [(region.row, region.column, region.rows, region.columns) for region in regions] == [
        (0, 0, 1, 3), (0, 3, 1, 3), (1, 0, 2, 3), (1, 3, 2, 3),
    ]  # fmt: skip


@settings(max_examples=200)
@given(tilings, shares, seeds)
def test_totals_are_exact_and_the_whole_is_in_them(tiling: Tiling, share: float, seed: int) -> None:
    found, total = allocation(tiling, share, seed)
    layout = found.layout
    assert layout.tokens == total == tiling.base + sum(found.budgets)
    assert layout.grid == (tiling.rows, tiling.columns + 1)
    assert found.full == tiling.base + tokens(tiling)
    assert found.regions == tiling.regions
    assert all(budget <= region.tokens for budget, region in zip(found.budgets, found.regions, strict=True))
    first, *rest = layout.views
    assert first.region == whole(tiling.rows, tiling.columns + 1)
    assert first.token_indices == tuple(range(tiling.base))
    shown = [(region, budget) for region, budget in zip(found.regions, found.budgets, strict=True) if budget]
    assert [(view.region, view.tokens) for view in rest] == shown
    assert all(view.native for view in rest)


@settings(max_examples=200)
@given(tilings, shares, seeds)
def test_kept_numbers_ascend_in_the_row_of_all_tokens(tiling: Tiling, share: float, seed: int) -> None:
    found, total = allocation(tiling, share, seed)
    numbers = kept_tokens(found, tiling)
    assert numbers == sorted(set(numbers))
    assert len(numbers) == total
    assert numbers[: tiling.base] == list(range(tiling.base))
    assert numbers[-1] < tiling.base + tokens(tiling)


@settings(max_examples=200)
@given(tilings, shares, seeds)
def test_each_tile_keeps_its_worthiest(tiling: Tiling, share: float, seed: int) -> None:
    """A newline is worth what its row is worth on average."""
    worth, _ = maps(tiling, seed)
    found, _ = allocation(tiling, share, seed)
    values = np.concatenate((worth, worth.mean(1, keepdims=True)), axis=1)
    kept = np.zeros(values.size, bool)
    kept[np.array(kept_tokens(found, tiling)[tiling.base :]) - tiling.base] = True
    kept = kept.reshape(values.shape)
    for region, budget in zip(found.regions, found.budgets, strict=True):
        part = np.s_[region.row : region.row + region.rows, region.column : region.column + region.columns]
        inside, chosen = values[part], kept[part]
        assert chosen.sum() == budget
        if 0 < budget < region.tokens:
            assert inside[chosen].min() >= inside[~chosen].max()


@settings(max_examples=200)
@given(tilings, shares, seeds)
def test_needed_are_the_tiles_of_kept_cells(tiling: Tiling, share: float, seed: int) -> None:
    """And of nothing else: newlines need no encoder."""
    found, _ = allocation(tiling, share, seed)
    places = sorted(
        {tile_of(tiling, row, column) for row in range(tiling.rows) for column in range(tiling.columns)}
    )
    expected = set()
    for number in kept_tokens(found, tiling)[tiling.base :]:
        row, column = divmod(number - tiling.base, tiling.columns + 1)
        if column < tiling.columns:
            expected.add(places.index(tile_of(tiling, row, column)))
    assert needed_tiles(found, tiling) == sorted(expected)


@given(tilings, seeds)
def test_where_everything_is_kept_everything_is_needed(tiling: Tiling, seed: int) -> None:
    found, _ = allocation(tiling, 1.0, seed)
    assert kept_tokens(found, tiling) == list(range(tiling.base + tokens(tiling)))
    assert needed_tiles(found, tiling) == list(range(len(tiling.regions)))


SQUARE = Tiling(rows=4, columns=4, side=2, top=0, left=0, base=5)
"""Four tiles, those on the right with two newlines each."""


def test_a_tile_of_which_a_newline_alone_is_kept_is_not_encoded() -> None:
    """The first row is worth something on the left, so its newline is worth half of that, and its cells nothing."""
    worth = np.zeros((4, 4), np.float32)
    worth[0:2, 0:2] = 1
    found = attend_tiles(worth, np.ones((4, 4), bool), SQUARE.base + 4 + 1, SQUARE)
    assert found.budgets == (4, 1, 0, 0)
    assert kept_tokens(found, SQUARE) == [0, 1, 2, 3, 4, 5, 6, 9, 10, 11]
    assert needed_tiles(found, SQUARE) == [0]


def test_the_most_relevant_tile_comes_whole_and_blanks_come_last() -> None:
    worth, held = np.full((4, 4), 0.1, np.float32), np.ones((4, 4), bool)
    worth[2:4, 0:2] = 0.9
    found = attend_tiles(worth, held, SQUARE.base + 4, SQUARE)
    assert found.budgets == (0, 0, 4, 0)
    assert needed_tiles(found, SQUARE) == [2]
    held[2:4, 0:2] = False
    worth[0:2] = 0.5
    blank = attend_tiles(worth, held, SQUARE.base + 4 + 6, SQUARE)
    assert blank.demands == (4, 6, 0, 6)
    assert blank.budgets == (4, 6, 0, 0)


@pytest.mark.parametrize("total", [-1, 0, 4, 5])
def test_totals_that_leave_nothing_beside_the_whole_are_refused(total: int) -> None:
    with pytest.raises(ValueError, match=f"{total} tokens are not more than the 5 of the view of the whole"):
        attend_tiles(np.ones((4, 4), np.float32), np.ones((4, 4), bool), total, SQUARE)


@given(tilings, shares, seeds)
def test_another_image_changes_nothing(tiling: Tiling, share: float, seed: int) -> None:
    alone, _ = allocation(tiling, share, seed)
    allocation(SQUARE, 0.5, seed)
    assert allocation(tiling, share, seed)[0] == alone


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_what_is_told_of_tiles_lies_in_the_image_and_adds_up(share: float) -> None:
    """Newlines count among the tokens, and are in no box."""
    pixels = np.full((60, 100, 3), 240, np.uint8)
    pixels[20:40, 50:90:3] = 10
    seen = survey(pixels, 10)
    tiling = Tiling(6, 10, side=4, top=1, left=1, base=16)
    total = 16 + round(share * 66)
    made = realize(
        seen, seen.keyword_map("Read it"), total, tensions=Tensions(0.2, 0.8, 0.8), balancer=Balancer(),
        choose=lambda worth, held, total: attend_tiles(worth, held, total, tiling),
    )  # fmt: skip
    told = json.loads(json.dumps(made.explanation()))
    assert told["tokens"] == total <= told["of"] == 16 + 66
    assert told["thumbnail_tokens"] == 16
    assert sum(region["tokens"] for region in told["regions"]) == total - 16
    assert sum(region["of"] for region in told["regions"]) == 66
    area = 0.0
    for region in told["regions"]:
        left, top, right, bottom = region["box"]
        assert 0 <= left < right <= 1
        assert 0 <= top < bottom <= 1
        area += (right - left) * (bottom - top)
        assert region["lod"] == float(region["tokens"] > 0)
    assert area == pytest.approx(1, abs=2e-3)
