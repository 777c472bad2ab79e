"""Regions tile the grid of every size exactly, as equal as they can be."""

from __future__ import annotations

import numpy as np
import pytest

from fovea.relevance.regions import FEW_TOKENS, LARGE, SMALL, partition


@pytest.mark.parametrize("side", [None, 1, 3, 4, 8, 100])
def test_every_cell_is_in_one_region(side: int | None) -> None:
    for rows in range(1, 61):
        for columns in (*range(1, 61, 7), rows):
            count = np.zeros((rows, columns), int)
            found = partition(rows, columns, side)
            for region in found:
                part = count[
                    region.row : region.row + region.rows, region.column : region.column + region.columns
                ]
                assert part.size == region.tokens > 0
                part += 1
            assert (count == 1).all()
            assert list(found) == sorted(found, key=lambda region: (region.row, region.column))
            for lengths in ({region.rows for region in found}, {region.columns for region in found}):
                assert max(lengths) - min(lengths) <= 1
                assert max(lengths) <= (side or LARGE)


@pytest.mark.parametrize("rows", range(1, 61))
def test_all_sizes_are_tiled(rows: int) -> None:
    for columns in range(1, 61):
        found = partition(rows, columns)
        assert sum(region.tokens for region in found) == rows * columns
        assert len(set(found)) == len(found)


def test_small_images_have_small_regions() -> None:
    assert max(region.rows for region in partition(18, 27)) == SMALL
    assert 18 * 27 < FEW_TOKENS <= 28 * 42
    assert max(region.rows for region in partition(28, 42)) == LARGE


def test_no_region_is_much_smaller_than_its_neighbours() -> None:
    """9 tokens a side are 4 and 5, and not 8 and 1."""
    assert {region.rows for region in partition(9, 64, 8)} == {4, 5}
