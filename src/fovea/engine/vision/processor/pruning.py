"""Prunes a video's visual tokens: leaves out the cells whose pixels change little.

Source: "Efficient Video Sampling" (arXiv 2510.14624). The score of a cell is the change of its pixels since
the previous frame. The first group is kept whole. The cells with the highest scores of the whole clip take
the remaining tokens. Unlike in that paper, the number of tokens follows from shape and rate alone, so a
request's cost is known before a frame is decoded; the pixels only decide which cells remain. The remaining
tokens keep their true positions.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

KeptCells = tuple[tuple[int, ...], ...]
"""For each group, the cells of its merged grid that are kept, ascending."""


def kept_count(groups: int, cells: int, rate: float) -> int:
    """Number of tokens that a clip keeps: at least one whole group; all tokens at rate 0."""
    return max(cells, int(groups * cells * (1 - rate))) if rate else groups * cells


def first_cells(groups: int, cells: int, count: int) -> KeptCells:
    """The first `count` cells of a clip.

    They stand for the cells that will remain in a prompt until the frames are decoded.
    """
    return tuple(tuple(range(max(0, min(cells, count - group * cells)))) for group in range(groups))


def moving_cells(frames: Iterable[NDArray[np.uint8]], group_frames: int, cell: int, count: int) -> KeptCells:
    """The `count` cells whose pixels change most, and all of the first group.

    Among cells of equal change, an earlier group comes first, then a higher row, then a column further left.
    The scores are integers, so equal frames always keep equal cells.

    frames: (height, width, 3) each; both sides are multiples of `cell`.
    group_frames: frames per group.
    cell: side of a cell, in pixels.
    """
    before: NDArray[np.int16] | None = None
    scores: list[NDArray[np.int64]] = []
    for index, frame in enumerate(frames):
        now = frame.astype(np.int16)
        down, across = now.shape[0] // cell, now.shape[1] // cell
        if before is None:
            change = np.zeros((down, across), np.int64)
        else:
            difference = np.abs(now - before).reshape(down, cell, across, cell * 3)
            change = difference.sum(axis=(1, 3), dtype=np.int64)
        before = now
        if index % group_frames:
            scores[-1] += change.ravel()
        else:
            scores.append(change.ravel())
    table = np.stack(scores)
    table[0] = np.iinfo(np.int64).max
    best = np.zeros(table.size, bool)
    best[np.argsort(-table.ravel(), kind="stable")[:count]] = True
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in best.reshape(table.shape))
