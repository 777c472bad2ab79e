"""The way from attention to a small view to all cells, along lines of text, and their needed resolution."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fovea.evaluation.scenes.draw import label_box
from fovea.relevance.knowing import (
    ACROSS,
    ALONG,
    SMALLEST,
    STROKES,
    along_lines,
    participatory,
    readable_at,
    resample,
    text_like,
)
from fovea.relevance.texture import texture
from tests.relevance import naive
from tests.relevance.pictures import CELL, cells_touching, picture


@pytest.mark.parametrize(
    ("shape", "grid"),
    [((1, 1), (3, 4)), ((2, 3), (7, 5)), ((4, 5), (4, 5)), ((3, 8), (30, 41)), ((5, 6), (2, 3))],
)
def test_resampling_is_bilinear(shape: tuple[int, int], grid: tuple[int, int]) -> None:
    values = np.random.default_rng(5).random(shape).astype(np.float32)
    result = resample(values, grid)
    assert result.shape == grid
    assert result.dtype == np.float32
    for row in range(grid[0]):
        for column in range(grid[1]):
            y = (row + 0.5) * shape[0] / grid[0] - 0.5
            x = (column + 0.5) * shape[1] / grid[1] - 0.5
            assert result[row, column] == pytest.approx(naive.bilinear(values, y, x), abs=1e-5)


def cells(*lines: str) -> np.ndarray:
    """Whether each cell has strokes: those that are not blank."""
    return np.array([[cell != " " for cell in line] for line in lines])


def at(shape: tuple[int, int], row: int, column: int) -> np.ndarray:
    values = np.zeros(shape, np.float32)
    values[row, column] = 1
    return values


def test_a_line_of_text_is_filled_from_its_beginning() -> None:
    """Each next cell gets 0.95 of the value of the cell before. Cells without strokes get none."""
    strokes = cells("abcdef  ")
    assert along_lines(at((1, 8), 0, 0), strokes)[0] == pytest.approx([*(ALONG**n for n in range(6)), 0, 0])
    end = along_lines(at((1, 8), 0, 5), strokes)[0]
    assert end == pytest.approx([*(ALONG ** (5 - n) for n in range(6)), 0, 0]), "and from its end"


def test_a_space_between_words_is_part_of_the_line_but_two_blank_cells_are_its_end() -> None:
    one = along_lines(at((1, 5), 0, 0), cells("ab cd"))[0]
    assert one == pytest.approx([ALONG**n for n in range(5)])
    two = along_lines(at((1, 6), 0, 0), cells("ab  cd"))[0]
    assert two == pytest.approx([1, ALONG, 0, 0, 0, 0])


def test_lines_above_and_below_get_half() -> None:
    result = along_lines(at((4, 3), 0, 0), cells("abc", "def", "   ", "ghi"))
    assert result[1] == pytest.approx([ACROSS * ALONG**n for n in range(3)])
    assert not result[2:].any(), "a blank line ends the text"


def test_a_shape_is_not_filled() -> None:
    """Shapes without text have no strokes, so attention to one of their cells stays there."""
    values = at((3, 3), 1, 1)
    assert np.array_equal(along_lines(values, np.zeros((3, 3), bool)), values)
    image, scene = picture(("red", "square", 200, 300, 200))
    assert not (text_like(image) > STROKES).any()
    assert cells_touching((scene.items[0].box,), image.grid).sum() > 20


def naive_lines(values: np.ndarray, strokes: np.ndarray) -> np.ndarray:
    """Carry values cell by cell, until no cell grows."""
    rows, columns = values.shape
    result = {(row, column): float(values[row, column]) for row in range(rows) for column in range(columns)}
    while True:
        before = dict(result)
        for row, column in before:
            beside = (row, column - 1), (row, column + 1)
            bridged = all(strokes[cell] if cell in before else False for cell in beside)
            if strokes[row, column] or bridged:
                carried = [ALONG * before.get(cell, 0) for cell in beside]
                carried += [ACROSS * before.get((row + step, column), 0) for step in (-1, 1)]
                result[row, column] = max(before[row, column], *carried)
        if max(result[cell] - before[cell] for cell in before) < SMALLEST:
            return np.array(list(result.values())).reshape(rows, columns)


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.integers(0, 999))
def test_lines_cell_by_cell(rows: int, columns: int, share: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    strokes = draw.random((rows, columns)) < share
    values = draw.random((rows, columns)).astype(np.float32) ** 3
    result = along_lines(values, strokes)
    assert result.dtype == np.float32
    assert (result >= values).all(), "no value falls"
    assert result.max() == values.max(), "none is larger than the highest"
    assert result == pytest.approx(naive_lines(values, strokes), abs=2 * SMALLEST)


@pytest.mark.parametrize("shape", [(100, 100), (1, 400), (400, 1)])
def test_it_ends_on_a_page_full_of_strokes(shape: tuple[int, int]) -> None:
    """Values fade as they are carried, so a value does not cross the whole page."""
    result = along_lines(at(shape, 0, 0), np.ones(shape, bool))
    assert result.max() == 1
    assert result.min() >= 0
    assert result[-1, -1] < 0.01


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from((1e-30, 1e-4, 1.0, 50.0)), st.integers(0, 99))
def test_the_map_lies_between_zero_and_one_whatever_the_scale_of_the_attention(
    rows: int, columns: int, scale: float, seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    asked = np.random.default_rng(seed).random((rows, columns)).astype(np.float32) * np.float32(scale)
    result = participatory(asked, texture(pixels, 8))
    assert result.shape == (8, 12)
    assert result.dtype == np.float32
    assert result.min() >= 0
    assert result.max() <= 1
    assert scale < 1e-4 or result.max() == pytest.approx(1)


def test_without_attention_no_cell_is_asked_about() -> None:
    image, _ = picture(text=("KX27QA", 200, 300, 30))
    assert not participatory(np.zeros((4, 4), np.float32), image).any()


def test_attention_to_the_first_letter_is_about_the_whole_text() -> None:
    image, scene = picture(("red", "square", 90, 90, 80), text=("KX27QA MB31ZT", 130, 300, 30))
    inside = cells_touching((label_box(scene.labels[0]),), image.grid) & (text_like(image) > STROKES)
    row, column = np.argwhere(inside)[0]
    result = participatory(at(image.grid, int(row), int(column)), image)
    assert inside.sum() >= 6
    assert result[inside].min() > 0.3
    assert not result[cells_touching((scene.items[0].box,), image.grid)].any()


def test_small_letters_need_full_resolution_and_large_shapes_half() -> None:
    """Stripes of 2 pixels vary within a quarter of a cell, those of 16 pixels between the quarters."""
    pixels = np.full((CELL, 3 * CELL, 3), 255, np.uint8)
    pixels[:, 0:CELL:4] = pixels[:, 1:CELL:4] = 0
    pixels[:, CELL : CELL + 16] = 0
    assert readable_at(texture(pixels, CELL)).tolist() == [[1.0, 0.5, 0.5]]


def test_plain_cells_of_every_grey_need_half() -> None:
    """By the rounding of float32, a third of all greys once needed full resolution."""
    greys = np.arange(256, dtype=np.uint8).repeat(CELL)[None, :, None]
    assert (readable_at(texture(np.broadcast_to(greys, (CELL, 256 * CELL, 3)), CELL)) == 0.5).all()


def test_small_text_needs_full_resolution() -> None:
    image, scene = picture(("blue", "square", 90, 90, 120), text=("KX27QA", 200, 300, 30))
    result = readable_at(image)
    assert result.dtype == np.float32
    assert (result[cells_touching((label_box(scene.labels[0]),), image.grid)] == 1).mean() > 0.8
    assert result[2, 2] == 0.5, "inside the square"
