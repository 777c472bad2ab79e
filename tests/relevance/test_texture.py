"""The 13 channels of a texture, each compared with its definition, pixel by pixel."""

from __future__ import annotations

import numpy as np
import pytest

from fovea.relevance.texture import CHANNELS, lab, texture
from tests.relevance import naive

EDGES = ("sobel_x", "sobel_y", "sobel", "range")


def random_picture(seed: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def page(height: int, width: int, grey: int = 240) -> np.ndarray:
    return np.full((height, width, 3), grey, np.uint8)


@pytest.mark.parametrize(("cell", "rows", "columns"), [(4, 3, 2), (5, 2, 3), (8, 1, 2), (14, 2, 1)])
def test_every_channel_agrees_with_its_definition(cell: int, rows: int, columns: int) -> None:
    pixels = random_picture(cell, rows * cell, columns * cell)
    image = texture(pixels, cell)
    assert image.channels.shape == (rows, columns, 13)
    assert image.channels.dtype == np.float32
    assert image.grid == (rows, columns)
    for row in range(rows):
        for column in range(columns):
            for name, value in naive.cell_channels(pixels, cell, row, column).items():
                # Means of colours are rounded to bytes.
                loose = 0.51 / 255 if name in ("red", "green", "blue") else 2e-6
                assert image[name][row, column] == pytest.approx(value, abs=loose), name


def test_there_are_thirteen_channels_and_none_repeats_another() -> None:
    assert len(CHANNELS) == len(set(CHANNELS)) == 13
    pixels = random_picture(0, 96, 112) // np.uint8(2)
    pixels[:48, :40] = (200, 30, 90)
    pixels[60:, 70:] = np.linspace(0, 255, 42, dtype=np.uint8)[None, :, None]
    table = texture(pixels, 8).channels.reshape(-1, 13)
    correlation = np.corrcoef(table.T) - np.eye(13)
    assert np.abs(correlation).max() < 0.99


def test_colours_with_known_values() -> None:
    known = {
        (1.0, 1.0, 1.0): (100, 0, 0),
        (0.0, 0.0, 0.0): (0, 0, 0),
        (1.0, 0.0, 0.0): (53.24, 80.09, 67.20),
        (0.0, 1.0, 0.0): (87.73, -86.18, 83.18),
        (0.0, 0.0, 1.0): (32.30, 79.19, -107.86),
    }
    for rgb, expected in known.items():
        assert lab(np.array(rgb, np.float32)) == pytest.approx(expected, abs=0.02)
        assert naive.lab(rgb) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("vertical", [True, False])
@pytest.mark.parametrize("cell", [14, 28, 32])
def test_a_thin_stroke_counts_equally_wherever_it_lies_in_a_cell(cell: int, vertical: bool) -> None:
    """Sums over all cells are equal. At the border of a cell, half of the edges belong to its neighbour."""
    result = []
    for at in range(cell, 2 * cell):
        pixels = page(3 * cell, 3 * cell)
        line = np.s_[:, at] if vertical else np.s_[at, :]
        pixels[line] = 60
        image = texture(pixels, cell)
        result.append([(image[name] - texture(page(3 * cell, 3 * cell), cell)[name]).sum() for name in EDGES])
        middle = image["range"][:, 1] if vertical else image["range"][1]
        assert middle == pytest.approx(180 / 255)
        own = image["sobel"][:, 1] if vertical else image["sobel"][1]
        inner = cell < at < 2 * cell - 1
        assert own == pytest.approx((2 if inner else 1) * 4 * 180 / cell / 1020, rel=1e-5)
    assert np.ptp(np.array(result), axis=0) == pytest.approx(0, abs=1e-5)
    assert result[0][2] > 0
    assert result[0][3] == pytest.approx(3 * 180 / 255)


def test_one_dark_pixel_counts_wherever_it_lies() -> None:
    """A plain resize samples two of sixteen pixels, and would miss most of them."""
    for at in range(28 * 28):
        pixels = page(84, 84)
        pixels[28 + at // 28, 28 + at % 28] = 0
        image = texture(pixels, 28)
        assert image["range"][1, 1] == pytest.approx(240 / 255)
        assert image["sobel"][1, 1] > 0
        assert image["range"].sum() == image["range"][1, 1]


def test_a_texture_does_not_depend_on_other_images() -> None:
    """It is also equal for a part of an image, except at the border and for the channels of position."""
    first, other = random_picture(1, 56, 84), page(56, 84)
    alone = texture(first, 28).channels.copy()
    texture(other, 28)
    assert np.array_equal(texture(first, 28).channels, alone)
    beside = texture(np.concatenate((first, other), axis=1), 28)
    local = [CHANNELS.index(name) for name in CHANNELS if name not in ("y", "x", "eccentricity")]
    assert np.array_equal(beside.channels[:, :2, local], alone[:, :2, local])


def test_faint_steps_keep_their_size() -> None:
    """No channel is scaled by its contrast: half the contrast is half the value."""
    strong, weak = page(28, 28, 200), page(28, 28, 200)
    strong[:, 10], weak[:, 10] = 100, 150
    for name in EDGES:
        assert texture(weak, 28)[name] == pytest.approx(texture(strong, 28)[name] / 2, abs=1e-7)


@pytest.mark.parametrize(("height", "width"), [(27, 28), (28, 30), (0, 28), (28, 0)])
def test_images_that_are_not_made_of_cells_are_refused(height: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"{width}x{height} pixels is not made of cells of 28"):
        texture(page(height, width), 28)
