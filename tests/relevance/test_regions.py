"""Regions cover every grid exactly, are not too long, and are cut where that separates the least content."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.relevance.realizing import BLANK, SIDE, Region, cut_out, partition
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
    assert max(max(region.rows, region.columns) for region in result) <= side


@pytest.mark.parametrize("side", [1, 3, 4, 8, SIDE, 100])
def test_without_content_regions_are_halved(side: int) -> None:
    """A side of 9 tokens is cut into 4 and 5, not into 8 and 1. A grid that is not too long is not cut."""
    for rows in range(1, 61, 1 if is_thorough() else 7 if side > 4 else 19):
        for columns in (*range(1, 61, 7), rows):
            result = partition(blank(rows, columns), side)
            if max(rows, columns) <= side:
                assert result == (Region(0, 0, rows, columns),)
            for length, lengths in (
                (rows, {region.rows for region in result}),
                (columns, {region.columns for region in result}),
            ):
                assert max(lengths) <= side
                assert min(lengths) >= min(length, (side + 1) // 2)


@given(st.integers(1, 80), st.integers(0, 99), st.floats(0, 1))
def test_one_row_and_one_column_are_cut_alike(length: int, seed: int, share: float) -> None:
    content = np.random.default_rng(seed).random((1, length)) < share
    row, column = partition(content), partition(content.T)
    assert [(region.column, region.columns) for region in row] == [
        (region.row, region.rows) for region in column
    ]
    assert {region.rows for region in row} == {region.columns for region in column} == {1}


def separated(content: Mask, at: int) -> int:
    """How many pairs of cells with content a cut before column `at` separates."""
    return sum(bool(row[at - 1] and row[at]) for row in content)


@given(st.integers(1, 7), st.integers(8, 60), st.integers(0, 999), st.floats(0, 1), st.booleans())
def test_the_cut_is_in_the_middle_half_where_it_separates_the_least(
    rows: int, columns: int, seed: int, share: float, across: bool
) -> None:
    """With the longest side just too long, there is one cut. It is compared with all others, one by one."""
    content = np.random.default_rng(seed).random((rows, columns)) < share
    first, second = partition(content.T if across else content, columns - 1)
    at = second.row if across else second.column
    assert first.tokens + second.tokens == content.size
    assert columns // 4 <= at <= columns - columns // 4
    middle = range(columns // 4, columns - columns // 4 + 1)
    assert separated(content, at) == min(separated(content, other) for other in middle)


@given(st.integers(3, 14), st.integers(15, 50), st.integers(1, 3), st.data())
def test_no_word_is_cut_if_a_band_of_blank_cells_goes_through_the_middle(
    rows: int, columns: int, width: int, data: st.DataObject
) -> None:
    """All other columns are full of text. The cut leaves as much of the band on both of its sides."""
    content = np.ones((rows, columns), bool)
    band = data.draw(st.integers(columns // 4, columns - columns // 4 - width))
    content[:, band : band + width] = False
    first, second = partition(content, columns - 1)
    assert first.columns == second.column
    assert band <= second.column <= band + width
    assert width == 1 or band < second.column < band + width


def test_a_cut_goes_through_the_widest_band() -> None:
    """A code was read with its last character twice, because a cut put half of it in each of two regions."""
    content = blank(12, 24)
    content[5:7, 2:11] = content[5:7, 13:22] = True
    assert {region.column for region in partition(content)} == {0, 12}
    content = np.ones((12, 24), bool)
    content[:, 7] = content[:, 14:17] = False
    assert {region.column for region in partition(content, 18)} == {0, 15}, "the middle of the wider band"


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
