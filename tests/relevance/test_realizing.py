"""Views: shapes that fit, tokens in their true places, and patches where the tower would have had them."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fovea.engine.vision.windows import patch_coordinates
from fovea.relevance.realizing import (
    Layout,
    View,
    patch_fractions,
    shape_holding,
    shape_within,
    token_places,
    top_tokens,
    view,
    view_at,
    whole,
)
from fovea.relevance.regions import Region, partition

sides = st.integers(1, 60)


def full(region: Region, shape: tuple[int, int]) -> View:
    return View(region, shape, tuple(range(shape[0] * shape[1])))


@given(sides, sides, st.integers(1, 4000))
def test_shapes_hold_and_fit(rows: int, columns: int, tokens: int) -> None:
    down, across = shape_within(rows, columns, tokens)
    assert 1 <= down <= rows
    assert 1 <= across <= columns
    assert down * across <= tokens or (down, across) == (1, 1)
    if tokens >= rows * columns:
        assert (down, across) == (rows, columns)
        return
    high, wide = shape_holding(rows, columns, tokens)
    assert 1 <= high <= rows
    assert 1 <= wide <= columns
    assert high * wide >= tokens
    assert shape_holding(rows, columns, rows * columns) == (rows, columns)


@given(st.integers(8, 60), st.integers(8, 60), st.floats(0.1, 0.95))
def test_shapes_are_about_as_large_as_asked_and_of_nearly_the_same_aspect(
    rows: int, columns: int, share: float
) -> None:
    """A few tokens can not keep the aspect and the number, so only where a row more or less is a small part."""
    tokens = round(rows * columns * share)
    within, holding = shape_within(rows, columns, tokens), shape_holding(rows, columns, tokens)
    assert within[0] * within[1] <= tokens <= holding[0] * holding[1]
    for down, across in (within, holding):
        if min(down, across) >= 5:
            assert 0.6 * tokens <= down * across <= 1.6 * tokens
            assert abs(math.log(down * columns / (across * rows))) < 0.3


@given(sides, sides, sides, sides, st.data())
def test_places_are_distinct_true_and_inside(
    top: int, left: int, rows: int, columns: int, data: st.DataObject
) -> None:
    shape = data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns))
    region = Region(top, left, rows, columns)
    places = token_places(region, shape)
    assert places.shape == (shape[0] * shape[1], 2)
    assert len({tuple(place) for place in places.tolist()}) == len(places)
    for number, (row, column) in enumerate(places.tolist()):
        i, j = divmod(number, shape[1])
        # The centre of the token, by exact fractions of the region; on a border it is the later cell's.
        assert row == top + (2 * i + 1) * rows // (2 * shape[0])
        assert column == left + (2 * j + 1) * columns // (2 * shape[1])
    assert places.min(0).tolist() >= [top, left]
    assert (places.max(0) < [top + rows, left + columns]).all()


@given(sides, sides)
def test_at_native_shape_places_are_the_cells(rows: int, columns: int) -> None:
    region = Region(3, 5, rows, columns)
    found = token_places(region, (rows, columns)).tolist()
    assert found == [[3 + row, 5 + column] for row in range(rows) for column in range(columns)]
    assert full(region, (rows, columns)).native
    assert rows * columns == 1 or not full(region, (1, 1)).native


@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("grid", [(1, 1), (1, 5), (4, 3), (16, 16), (32, 28), (48, 31)])
def test_patches_of_the_whole_are_where_the_tower_has_them(grid: tuple[int, int], merge: int) -> None:
    found = patch_fractions(full(whole(*grid), grid), grid, merge)
    size = np.array([grid[0] * merge, grid[1] * merge])
    coordinates = patch_coordinates((1, int(size[0]), int(size[1])), merge)
    assert found == pytest.approx(coordinates / np.maximum(size - 1, 1), abs=1e-6)
    assert found.dtype == np.float32


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("grid", [(9, 7), (20, 33)])
def test_a_native_region_is_a_part_of_the_whole(grid: tuple[int, int], merge: int) -> None:
    table = patch_fractions(full(whole(*grid), grid), grid, merge).reshape(*grid, merge * merge, 2)
    for region in partition(np.zeros(grid, bool)):
        found = patch_fractions(full(region, (region.rows, region.columns)), grid, merge)
        part = table[region.row : region.row + region.rows, region.column : region.column + region.columns]
        assert np.array_equal(found, part.reshape(-1, 2))


@given(sides, sides, st.data())
def test_patches_of_a_smaller_view_are_spread_evenly(rows: int, columns: int, data: st.DataObject) -> None:
    """Their mean is the region's middle as long as none is cut off at the image's border."""
    shape = data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns))
    region, grid = Region(30, 40, rows, columns), (200, 300)
    found = patch_fractions(full(region, shape), grid, 2)
    assert found.shape == (shape[0] * shape[1] * 4, 2)
    middle = [(60 + rows - 0.5) / 399, (80 + columns - 0.5) / 599]
    assert found.astype(np.float64).mean(0) == pytest.approx(middle, abs=1e-5)
    assert found.min() >= 0
    assert found.max() <= 1
    tokens = found.reshape(shape[0], shape[1], 2, 2, 2)
    assert (np.diff(tokens[:, 0, :, 0, 0].ravel()) > 0).all()
    assert (np.diff(tokens[0, :, 0, :, 1].ravel()) > 0).all()


def test_the_worthiest_are_kept_and_among_equals_the_earlier() -> None:
    values = np.array([0.1, 0.9, 0.5, 0.5, 0.9, 0.0], np.float32)
    assert top_tokens(values, 3) == (1, 2, 4)
    assert top_tokens(values, 6) == (0, 1, 2, 3, 4, 5)
    assert top_tokens(np.zeros(4), 2) == (0, 1)


def test_a_view_keeps_cells_of_the_region_by_their_own_worth() -> None:
    worth = np.zeros((8, 8), np.float32)
    worth[5, 6], worth[4, 4], worth[0, 0] = 0.9, 0.8, 1.0
    found = view(Region(4, 4, 4, 4), 2, worth, native=True)
    assert found.token_indices == (0, 6)
    assert Layout((8, 8), (found,)).places().tolist() == [[4, 4], [5, 6]]
    lower = view(Region(4, 4, 4, 4), 4, worth, native=False)
    assert lower.shape == (2, 2)
    assert lower.tokens == 4
    for shape in ((1, 4), (2, 3), (4, 4)):
        wished = view_at(Region(4, 4, 4, 4), shape, 2, worth)
        assert wished.shape == shape
        assert wished.tokens == 2
    assert view_at(Region(4, 4, 4, 4), (4, 4), 2, worth) == found
