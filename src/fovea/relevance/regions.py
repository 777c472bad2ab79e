"""Cuts an image's grid of visual tokens into regions, each of which gets a number of tokens of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.relevance.texture import Map, Mask

SIDE = 14
"""Side of a region, in tokens. 14x14 tokens are the 200-token level of the ARR-COC design. Smaller regions
cut through text more often, and the model reads it less well (benchmarks/LOG.md)."""
SHIFT = 2
"""Largest distance of a cut, in tokens, from the place where it would make regions equal."""
BLANK = 0.001
"""A cell without content counts as so much relevance against a rectangle, because it is encoded, too."""


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A rectangle of the full grid, in tokens. Regions are ordered as they are read."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the region at its native resolution."""
        return self.rows * self.columns

    @property
    def cells(self) -> tuple[slice, slice]:
        """Index of the region's cells in a map of the full grid, (rows, columns, ...)."""
        return slice(self.row, self.row + self.rows), slice(self.column, self.column + self.columns)


def partition(content: Mask, side: int = SIDE) -> tuple[Region, ...]:
    """Cut the grid into regions of about equal size. They are in reading order and cover the grid exactly.

    Each cut separates as little content as possible, at most SHIFT tokens from the place where it would make
    regions equal. No side of a region is longer than `side` + SHIFT tokens. The question plays no part, so
    that all questions about an image get the same regions.

    content: whether a cell has content, (rows, columns).
    side: usual side of a region, in tokens.
    """
    across = (content[1:] & content[:-1]).sum(1)
    along = (content[:, 1:] & content[:, :-1]).sum(0)
    return tuple(
        Region(top, left, bottom - top, right - left)
        for top, bottom in _cuts(across, side)
        for left, right in _cuts(along, side)
    )


def cut_out(region: Region, relevance: Map, content: Mask, cells: int) -> tuple[Region, ...]:
    """Cut a region into a rectangle around its most relevant cell with content, and what is left beside it.

    Among the rectangles with at most `cells` cells with content, it is the one with the most relevance. The
    rest is a region above and one below it, as wide as the region, and one on each side. All are in reading
    order.

    relevance: of every cell of the full grid, (rows, columns); content: whether it has content.
    cells: at least 1.
    """
    held = content[region.cells]
    peak, middle = divmod(int(np.argmax(np.where(held, relevance[region.cells], -1))), region.columns)
    counts = _sums(held, peak, middle)
    worth = _sums(np.where(held, relevance[region.cells], -BLANK), peak, middle)
    best = int(np.argmax(np.where(counts <= cells, worth, -np.inf)))
    up, down, before, after = (int(place) for place in np.unravel_index(best, counts.shape))
    top, bottom, left, right = peak - up, peak + 1 + down, middle - before, middle + 1 + after
    pieces = (
        (0, 0, top, region.columns),
        (top, 0, bottom - top, left),
        (top, left, bottom - top, right - left),
        (top, right, bottom - top, region.columns - right),
        (bottom, 0, region.rows - bottom, region.columns),
    )
    return tuple(
        Region(region.row + row, region.column + column, rows, columns)
        for row, column, rows, columns in pieces
        if rows and columns
    )


def _sums(values: NDArray[Any], row: int, column: int) -> NDArray[np.float64]:
    """Sums of all rectangles around a cell, by the numbers of cells above it, below it, before it, after
    it."""
    table = np.zeros((values.shape[0] + 1, values.shape[1] + 1))
    table[1:, 1:] = values.cumsum(0, dtype=np.float64).cumsum(1)
    bands = table[row + 1 :][None] - table[row::-1][:, None]
    sums: NDArray[np.float64] = bands[:, :, None, column + 1 :] - bands[:, :, column::-1, None]
    return sums


def _cuts(separated: NDArray[np.int_], side: int) -> list[tuple[int, int]]:
    """Start and end of each region along one axis.

    separated: for a cut before cell 1, 2, ..., how many pairs of neighbours that both have content it
        separates.
    """
    length = len(separated) + 1
    count, shift = -(-length // side), min(SHIFT, side // 4)
    edges = [0]
    for number in range(1, count):
        equal = length * number // count
        last = min(equal + shift, edges[-1] + side + shift)
        near = sorted(range(equal - shift, last + 1), key=lambda edge: abs(edge - equal))
        edges.append(min(near, key=lambda edge: separated[edge - 1]))
    edges.append(length)
    return list(zip(edges, edges[1:], strict=False))
