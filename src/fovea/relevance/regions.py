"""Cuts an image's grid of visual tokens into regions, each of which gets a number of tokens of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fovea.relevance.texture import Mask

SIDE = 14
"""Side of a region, in tokens. 14x14 tokens are the 200-token level of the ARR-COC design. Smaller regions
cut through text more often, and the model reads it less well (benchmarks/LOG.md)."""
SHIFT = 2
"""Largest distance of a cut, in tokens, from the place where it would make regions equal."""


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of the full grid, in tokens."""

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
