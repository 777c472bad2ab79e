"""Views: shapes that fit, tokens at their true places, and patches at the positions of the full image."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fovea.engine.vision.processor.sizes import patch_coordinates
from fovea.relevance.realizing import (
    Layout,
    Region,
    View,
    partition,
    patch_fractions,
    shape_holding,
    shape_within,
    token_places,
    top_tokens,
    view,
    view_at,
    whole,
)

sides = st.integers(1, 60)


def full(region: Region, shape: tuple[int, int]) -> View:
    return View(region, shape, tuple(range(shape[0] * shape[1])))


@given(sides, sides, st.integers(1, 4000))
def test_shapes_keep_their_limits(rows: int, columns: int, tokens: int) -> None:
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
def test_shapes_have_nearly_the_wanted_size_and_aspect_ratio(rows: int, columns: int, share: float) -> None:
    """Only for shapes of five rows and columns or more: with fewer, one row more or less is a large part."""
    tokens = round(rows * columns * share)
    within, holding = shape_within(rows, columns, tokens), shape_holding(rows, columns, tokens)
    assert within[0] * within[1] <= tokens <= holding[0] * holding[1]
    for down, across in (within, holding):
        if min(down, across) >= 5:
            assert 0.6 * tokens <= down * across <= 1.6 * tokens
            assert abs(math.log(down * columns / (across * rows))) < 0.3


def test_a_centre_on_a_border_belongs_to_the_later_cell() -> None:
    """Token 27 of 55 has its centre at row 28 of 56. Floating-point division made it 27.999."""
    assert token_places(Region(0, 0, 56, 1), (55, 1))[27].tolist() == [28, 0]


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
        # The token's centre, in exact fractions of the region. On a border it belongs to the later cell.
        assert row == top + (2 * i + 1) * rows // (2 * shape[0])
        assert column == left + (2 * j + 1) * columns // (2 * shape[1])
    assert places.min(0).tolist() >= [top, left]
    assert (places.max(0) < [top + rows, left + columns]).all()


@given(sides, sides)
def test_at_native_shape_places_are_the_cells(rows: int, columns: int) -> None:
    region = Region(3, 5, rows, columns)
    result = token_places(region, (rows, columns)).tolist()
    assert result == [[3 + row, 5 + column] for row in range(rows) for column in range(columns)]
    assert full(region, (rows, columns)).native
    assert rows * columns == 1 or not full(region, (1, 1)).native


@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("grid", [(1, 1), (1, 5), (4, 3), (16, 16), (32, 28), (48, 31)])
def test_patches_of_the_whole_have_the_positions_of_the_tower(grid: tuple[int, int], merge: int) -> None:
    result = patch_fractions(full(whole(*grid), grid), grid, merge)
    size = np.array([grid[0] * merge, grid[1] * merge])
    coordinates = patch_coordinates((1, int(size[0]), int(size[1])), merge)
    assert result == pytest.approx(coordinates / np.maximum(size - 1, 1), abs=1e-6)
    assert result.dtype == np.float32


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("grid", [(9, 7), (20, 33)])
def test_a_native_region_is_a_part_of_the_whole(grid: tuple[int, int], merge: int) -> None:
    table = patch_fractions(full(whole(*grid), grid), grid, merge).reshape(*grid, merge * merge, 2)
    for region in partition(np.zeros(grid, bool)):
        result = patch_fractions(full(region, (region.rows, region.columns)), grid, merge)
        part = table[region.row : region.row + region.rows, region.column : region.column + region.columns]
        assert np.array_equal(result, part.reshape(-1, 2))


@given(sides, sides, st.data())
def test_patches_of_a_smaller_view_are_spread_evenly(rows: int, columns: int, data: st.DataObject) -> None:
    """Their mean is the middle of the region, if none is clipped at the border of the image."""
    shape = data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns))
    region, grid = Region(30, 40, rows, columns), (200, 300)
    result = patch_fractions(full(region, shape), grid, 2)
    assert result.shape == (shape[0] * shape[1] * 4, 2)
    middle = [(60 + rows - 0.5) / 399, (80 + columns - 0.5) / 599]
    assert result.astype(np.float64).mean(0) == pytest.approx(middle, abs=1e-5)
    assert result.min() >= 0
    assert result.max() <= 1
    tokens = result.reshape(shape[0], shape[1], 2, 2, 2)
    assert (np.diff(tokens[:, 0, :, 0, 0].ravel()) > 0).all()
    assert (np.diff(tokens[0, :, 0, :, 1].ravel()) > 0).all()


def test_the_most_relevant_are_kept_and_among_equals_the_earlier() -> None:
    values = np.array([0.1, 0.9, 0.5, 0.5, 0.9, 0.0], np.float32)
    assert top_tokens(values, 3) == (1, 2, 4)
    assert top_tokens(values, 6) == (0, 1, 2, 3, 4, 5)
    assert top_tokens(np.zeros(4), 2) == (0, 1)


def test_a_view_keeps_cells_of_the_region_by_their_own_relevance() -> None:
    relevance = np.zeros((8, 8), np.float32)
    relevance[5, 6], relevance[4, 4], relevance[0, 0] = 0.9, 0.8, 1.0
    content = relevance > 0
    result = view(Region(4, 4, 4, 4), 2, relevance, content)
    assert result.token_indices == (0, 6)
    assert Layout((8, 8), (result,)).places().tolist() == [[4, 4], [5, 6]]
    lower = view(Region(4, 4, 4, 4), 4, relevance, np.ones((8, 8), bool))
    assert lower.shape == (2, 2)
    assert lower.tokens == 4
    for shape in ((1, 4), (2, 3), (4, 4)):
        shaped = view_at(Region(4, 4, 4, 4), shape, 2, relevance)
        assert shaped.shape == shape
        assert shaped.tokens == 2
    assert view_at(Region(4, 4, 4, 4), (4, 4), 2, relevance) == result


def test_content_comes_before_blank_cells_that_are_more_relevant() -> None:
    """Relevance is blurred. At native resolution, blank cells beside a text once replaced another thing."""
    relevance, content = np.zeros((8, 8), np.float32), np.zeros((8, 8), bool)
    relevance[2, 1:4], content[2, 2], content[6, 6] = 1.0, True, True
    native = view(Region(0, 0, 8, 8), 2, relevance, content)
    assert native.native
    assert native.token_indices == (2 * 8 + 2, 6 * 8 + 6)
    assert view(Region(0, 0, 8, 8), 4, relevance, content).token_indices == (17, 18, 19, 54)


def test_a_lower_resolution_is_that_of_the_content() -> None:
    """Half of the cells with content in tokens: half of the cells are encoded, and the blank ones left out.

    All cells once shared the tokens, so a small thing in an empty region was hardly shown at all.
    """
    relevance, content = np.full((16, 16), 0.5, np.float32), np.zeros((16, 16), bool)
    content[0:8, 0:8] = True
    lower = view(Region(0, 0, 16, 16), 32, relevance, content)
    assert lower.shape[0] * lower.shape[1] in range(128, 145)
    assert lower.tokens == 32
    places = Layout((16, 16), (lower,)).places()
    assert content[places[:, 0], places[:, 1]].all()


@given(sides, sides, st.integers(0, 99), st.floats(0, 1), st.floats(0, 1))
def test_a_view_has_the_share_of_native_resolution_that_its_tokens_are_of_the_content(
    rows: int, columns: int, seed: int, filled: float, share: float
) -> None:
    draw = np.random.default_rng(seed)
    content = draw.random((rows, columns)) < filled
    tokens = max(1, round(share * rows * columns))
    result = view(whole(rows, columns), tokens, draw.random((rows, columns)).astype(np.float32), content)
    held = int(content.sum())
    assert result.tokens == tokens
    assert result.native or tokens < held
    assert result.shape[0] * result.shape[1] * held >= min(tokens, held) * rows * columns
    kept = Layout((rows, columns), (result,)).places()
    if tokens >= held:
        assert content[kept[:, 0], kept[:, 1]].sum() == held
