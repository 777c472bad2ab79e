"""Which patches of an image see each other, and in what order they stand: arithmetic on grids, no weights.

Patches arrive in merge order: the `merge` x `merge` patches that become one visual token are neighbours in the list.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


def patch_coordinates(grid: tuple[int, int, int], merge: int) -> Index:
    """(row, column) of every patch in merge order, (t * h * w, 2)."""
    time, height, width = grid
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    blocked = (height // merge, merge, width // merge, merge)
    order = [axis.reshape(blocked).transpose(0, 2, 1, 3).ravel() for axis in (rows, columns)]
    return np.tile(np.stack(order, axis=1), (time, 1))


def window_order(
    grid: tuple[int, int, int], merge: int, window: int
) -> tuple[Index, tuple[tuple[int, int], ...]]:
    """Visual tokens so that those of a window are neighbours, windows of equal size together, frame by frame.

    `window` is the side of a window in merged tokens. Returns the tokens' numbers in merge order, (tokens,), and runs
    of (windows, patches per window): edges and corners of the grid make smaller windows, hence up to four runs a frame.
    """
    time, height, width = grid[0], grid[1] // merge, grid[2] // merge
    tokens = np.arange(time * height * width).reshape(time, height, width)
    order: list[Index] = []
    runs: list[tuple[int, int]] = []
    for frame in tokens:
        by_size: dict[int, list[Index]] = {}
        for top in range(0, height, window):
            for left in range(0, width, window):
                block = frame[top : top + window, left : left + window].ravel()
                by_size.setdefault(block.size, []).append(block)
        for size, blocks in by_size.items():
            order += blocks
            runs.append((len(blocks), size * merge**2))
    return np.concatenate(order), tuple(runs)


def bilinear_taps(grid: tuple[int, int, int], merge: int, side: int) -> tuple[Index, NDArray[np.float32]]:
    """How a `side` x `side` table of positions is resampled to the grid, corners aligned.

    Returns indices and weights, both (t * h * w, 4), in merge order.
    """
    coordinates = patch_coordinates(grid, merge).astype(np.float32)
    last = np.array((max(grid[1] - 1, 1), max(grid[2] - 1, 1)), np.float32)
    return _taps(coordinates * np.float32(side - 1) / last, side)


def taps_at(fractions: NDArray[np.float32], side: int) -> tuple[Index, NDArray[np.float32]]:
    """The same for patches anywhere between the first and the last of the grid: fractions (patches, 2) in [0, 1]."""
    return _taps(fractions * np.float32(side - 1), side)


def _taps(positions: NDArray[np.float32], side: int) -> tuple[Index, NDArray[np.float32]]:
    """positions (patches, 2) in units of the table's entries."""
    taps, weights = [], []
    for position in positions.T:
        floor = np.floor(position).astype(np.int64)
        part = position - floor.astype(np.float32)
        taps.append(np.stack((floor, np.minimum(floor + 1, side - 1)), axis=1))
        weights.append(np.stack((np.float32(1) - part, part), axis=1))
    index = (taps[0][:, :, None] * side + taps[1][:, None, :]).reshape(-1, 4)
    weight = (weights[0][:, :, None] * weights[1][:, None, :]).reshape(-1, 4)
    return index, weight.astype(np.float32)
