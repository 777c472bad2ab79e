"""The texture in torch is the one in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fovea.kernels.texture import texture
from fovea.relevance.texture import CHANNELS
from fovea.relevance.texture import texture as in_numpy


def images(seed: int, height: int, width: int) -> np.ndarray:
    """Noise, a page with strokes, and colours."""
    draw = np.random.default_rng(seed)
    noise = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
    page = np.full((height, width, 3), 240, np.uint8)
    page[height // 3, :], page[:, width // 2] = 30, (200, 10, 60)
    dark = draw.integers(0, 20, (height, width, 3), dtype=np.uint8)
    return np.stack((noise, page, dark))


@pytest.mark.parametrize(
    ("cell", "rows", "columns"), [(2, 5, 3), (3, 4, 4), (5, 3, 2), (14, 2, 3), (28, 4, 3), (32, 2, 2)]
)
def test_it_agrees_with_numpy(cell: int, rows: int, columns: int) -> None:
    stack = images(cell, rows * cell, columns * cell)
    found = texture(torch.from_numpy(stack), cell)
    assert found.shape == (3, rows, columns, len(CHANNELS))
    assert found.dtype == torch.float32
    for image, channels in zip(stack, found, strict=True):
        assert np.abs(channels.numpy() - in_numpy(image, cell).channels).max() < 1e-4


@pytest.mark.parametrize("cell", [4, 28])
def test_who_shares_a_stack_changes_nothing(cell: int) -> None:
    """Alone up to rounding, since how many values a vector instruction takes depends on where they lie."""
    stack = torch.from_numpy(images(1, 2 * cell, 3 * cell))
    together = texture(stack, cell)
    for number, image in enumerate(stack):
        assert (texture(image, cell) - together[number]).abs().max() < 1e-6
        others = 255 - stack
        others[number] = image
        assert torch.equal(texture(others, cell)[number], together[number])


def test_means_of_colour_are_rounded_as_pillow_does_it() -> None:
    """Every possible sum of two neighbouring levels, cell by cell."""
    cell = 7
    pixels = np.empty((49 * cell, 4 * cell, 3), np.uint8)
    for share in range(49):
        values = np.r_[np.full(share, 101), np.full(49 - share, 100)].astype(np.uint8).reshape(cell, cell)
        pixels[share * cell : (share + 1) * cell] = np.tile(values, (1, 4))[:, :, None]
    found = texture(torch.from_numpy(pixels), cell)[:, :, :3].numpy()
    assert np.array_equal(found, in_numpy(pixels, cell).channels[:, :, :3])


def test_images_that_are_not_made_of_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="30x28 pixels is not made of cells of 28"):
        texture(torch.zeros(28, 30, 3, dtype=torch.uint8), 28)
