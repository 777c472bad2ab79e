"""Regions cover every grid exactly, are about equal, and are cut where that separates the least content."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.relevance.realizing import BLANK, SHIFT, SIDE, Region, cut_out, partition
from fovea.relevance.texture import Mask
from tests.support.thorough import is_thorough

lengths = st.integers(1, 60)


def blank(rows: int, columns: int) -> Mask:
    return np.zeros((rows, columns), bool)


@given(lengths, lengths, st.sampled_from((1, 3, 4, 8, SIDE, 100)), st.floats(0, 1), st.integers(0, 99))
def test_every_cell_is_in_one_region(rows: int, columns: int, side: int, share: float, seed: int) -> None:
    content = np.random.default_rng(seed).random((rows, columns)) < share
    count = np.zeros((rows, columns), int)
    result = partition(content, side)
    for region in result:
        assert count[region.cells].size == region.tokens > 0
        count[region.cells] += 1
    assert (count == 1).all()
    assert list(result) == sorted(result, key=lambda region: (region.row, region.column))
    most = side + min(SHIFT, side // 4)
    assert max(max(region.rows, region.columns) for region in result) <= most


@pytest.mark.parametrize("side", [1, 3, 4, 8, SIDE, 100])
def test_without_content_regions_are_as_equal_as_possible(side: int) -> None:
    """A side of 9 tokens is cut into 4 and 5, not into 8 and 1."""
    # A side of 1 makes thousands of regions, and nothing that a side of 3 does not.
    for rows in range(1, 61, 1 if side > 1 or is_thorough() else 9):
        for columns in (*range(1, 61, 7), rows):
            result = partition(blank(rows, columns), side)
            for lengths in ({region.rows for region in result}, {region.columns for region in result}):
                assert max(lengths) - min(lengths) <= 1
                assert max(lengths) <= side


def test_a_cut_goes_round_a_word() -> None:
    """A code was read with its last character twice, because a cut put half of it in each of two regions."""
    content = blank(28, 42)
    content[5, 12:16] = content[6, 12:16] = True
    assert {region.column for region in partition(blank(28, 42))} == {0, 14, 28}
    assert {region.column for region in partition(content)} == {0, 12, 28}
    content[5, 8:14] = content[6, 8:14] = True
    assert {region.column for region in partition(content)} == {0, 16, 28}


def test_content_that_is_everywhere_moves_no_cut() -> None:
    assert partition(np.ones((40, 56), bool)) == partition(blank(40, 56))


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 99), st.floats(0, 1), st.integers(0, 99))
def test_the_part_around_the_peak_has_the_most_relevance_that_fits(
    rows: int, columns: int, cells: int, share: float, seed: int
) -> None:
    """Compared with all rectangles around the peak, one by one."""
    draw = np.random.default_rng(seed)
    relevance = draw.random((rows + 3, columns + 5)).astype(np.float32)
    content = draw.random(relevance.shape) < share
    region = Region(2, 4, rows, columns)
    if not content[region.cells].any():
        return
    values = np.where(content, relevance, -1)[region.cells]
    row, column = divmod(int(values.argmax()), columns)
    result = cut_out(region, relevance, content, cells)
    count = np.zeros(relevance.shape, int)
    for part in result:
        count[part.cells] += 1
    assert (count[region.cells] == 1).all()
    assert count.sum() == region.tokens
    assert list(result) == sorted(result)
    [best] = [part for part in result if holds(part, 2 + row, 4 + column)]
    assert content[best.cells].sum() <= cells

    def worth(part: Region) -> float:
        inside = content[part.cells]
        return float(relevance[part.cells][inside].sum(dtype=np.float64)) - BLANK * float((~inside).sum())

    most = max(
        worth(Region(2 + top, 4 + left, bottom - top, right - left))
        for top in range(row + 1)
        for bottom in range(row + 1, rows + 1)
        for left in range(column + 1)
        for right in range(column + 1, columns + 1)
        if content[2 + top : 2 + bottom, 4 + left : 4 + right].sum() <= cells
    )
    assert worth(best) == pytest.approx(most)


def holds(region: Region, row: int, column: int) -> bool:
    return 0 <= row - region.row < region.rows and 0 <= column - region.column < region.columns


def test_a_text_is_cut_out_of_a_full_region() -> None:
    relevance, content = np.full((14, 14), 0.1, np.float32), np.ones((14, 14), bool)
    relevance[5:7, 3:9] = 0.9
    assert cut_out(Region(0, 0, 14, 14), relevance, content, 12) == (
        Region(0, 0, 5, 14), Region(5, 0, 2, 3), Region(5, 3, 2, 6), Region(5, 9, 2, 5), Region(7, 0, 7, 14),
    )  # fmt: skip


def test_blank_cells_cost_no_tokens_but_are_not_added_for_nothing() -> None:
    relevance, content = np.full((14, 14), 0.1, np.float32), blank(14, 14)
    content[2, 2:6] = content[10, 3] = True
    assert Region(2, 2, 9, 4) in cut_out(Region(0, 0, 14, 14), relevance, content, 5)
    assert Region(2, 2, 1, 4) in cut_out(Region(0, 0, 14, 14), relevance, content, 4)
