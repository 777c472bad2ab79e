"""Leaving out a video's visual tokens where the picture stands still.

After "Efficient Video Sampling" (arXiv 2510.14624): a cell is worth what its pixels changed since the frame before, the
first group is kept whole, and the changed ones of the whole clip share what room is left. Unlike there, how many are
kept follows from shape and rate alone, so a request's cost is known before a frame is decoded; pixels only say which.
Kept tokens keep their true positions.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Kept = tuple[tuple[int, ...], ...]
"""For each frame group, the cells of its merged grid that are kept, ascending."""


def kept_count(groups: int, cells: int, rate: float) -> int:
    """Tokens that a clip keeps: at least one whole group, all at rate 0."""
    return max(cells, int(groups * cells * (1 - rate))) if rate else groups * cells


def first_cells(groups: int, cells: int, count: int) -> Kept:
    """Any `count` cells: what a prompt is measured with while nobody has seen the frames."""
    return tuple(tuple(range(max(0, min(cells, count - group * cells)))) for group in range(groups))


def moving_cells(frames: Iterable[NDArray[np.uint8]], together: int, cell: int, count: int) -> Kept:
    """The `count` cells that changed most. Whole numbers throughout: equal frames always keep equal cells.

    frames: (height, width, 3), both sides multiples of `cell` pixels; `together` of them are a group.
    Among cells of equal change, earlier ones and those further up and left go first.
    """
    before: NDArray[np.int16] | None = None
    scores: list[NDArray[np.int64]] = []
    for index, frame in enumerate(frames):
        now = frame.astype(np.int16)
        down, across = now.shape[0] // cell, now.shape[1] // cell
        if before is None:
            change = np.zeros((down, across), np.int64)
        else:
            moved = np.abs(now - before).reshape(down, cell, across, cell * 3)
            change = moved.sum(axis=(1, 3), dtype=np.int64)
        before = now
        if index % together:
            scores[-1] += change.ravel()
        else:
            scores.append(change.ravel())
    table = np.stack(scores)
    table[0] = np.iinfo(np.int64).max
    best = np.zeros(table.size, bool)
    best[np.argsort(-table.ravel(), kind="stable")[:count]] = True
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in best.reshape(table.shape))
