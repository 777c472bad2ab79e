"""The order of an image's patches and their attention windows: arithmetic on grids, no weights.

Patches arrive in merge order: the `merge` x `merge` patches that become one visual token are neighbours in
the list.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


def patch_coordinates(grid: tuple[int, int, int], merge: int) -> Index:
    """Row and column of every patch in merge order, (t * h * w, 2). grid: (t, h, w) in patches."""
    time, height, width = grid
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    blocked = (height // merge, merge, width // merge, merge)
    order = [axis.reshape(blocked).transpose(0, 2, 1, 3).ravel() for axis in (rows, columns)]
    return np.tile(np.stack(order, axis=1), (time, 1))


def nested_axes(merges: int) -> list[int]:
    """The order of the axes of a picture in which the patches of each merge are neighbours.

    The picture has the axes (rows, 2, ..., 2, rest, columns, 2, ..., 2, rest): both sides are cut into parts
    of 2**merges patches, these into halves, and so on. The two axes `rest` are not in the result; they come
    after the others, in any order.
    """
    return [axis for level in range(merges + 1) for axis in (level, merges + 2 + level)]


def nested_coordinates(grid: tuple[int, int], merges: int) -> Index:
    """Row and column of every patch, (rows * columns, 2), if 2 x 2 patches are merged several times.

    After each merge, the next four neighbours in the list are a square of 2 x 2.

    grid: (rows, columns) of patches, multiples of 2**merges.
    """
    cut = [part for side in grid for part in (side >> merges, *(2,) * merges, 1)]
    axes = np.meshgrid(*map(np.arange, grid), indexing="ij")
    order = (*nested_axes(merges), merges + 1, 2 * merges + 3)
    return np.stack([axis.reshape(cut).transpose(order).ravel() for axis in axes], axis=1)


def window_order(
    grid: tuple[int, int, int], merge: int, window: int
) -> tuple[Index, tuple[tuple[int, int], ...]]:
    """Order the visual tokens by window, frame by frame, with windows of equal size next to each other.

    grid: (t, h, w) in patches.
    window: side of a window in visual tokens.

    Returns the tokens' numbers in merge order, (tokens,), and the runs (windows, patches per window). Windows
    at the edges and in the corner of the grid are smaller, so a frame has up to four runs.
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
