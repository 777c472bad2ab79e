"""Regions cover every grid exactly, are about equal, and are cut where that separates the least content."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.relevance.regions import SHIFT, SIDE, partition
from fovea.relevance.texture import Mask

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
    for rows in range(1, 61):
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
