"""An image's grid of visual tokens cut into regions, each of which gets a level of detail of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fovea.relevance.texture import Mask

SIDE = 14
"""Of a region, in tokens. 14x14 is the documents' level of 200 tokens; in smaller regions what is written is cut more often, and
read less well (benchmarks/LOG.md)."""
SHIFT = 2
"""How far a cut may be from where it would make regions equal, at most."""


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of the full grid, in tokens."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """What its native resolution carries."""
        return self.rows * self.columns

    @property
    def cells(self) -> tuple[slice, slice]:
        """Where its cells are in a map of the full grid, (rows, columns, ...)."""
        return slice(self.row, self.row + self.rows), slice(self.column, self.column + self.columns)


def partition(held: Mask, side: int = SIDE) -> tuple[Region, ...]:
    """Regions in reading order; they tile the grid. held: cells with content, (rows, columns).

    They are about equal, of at most `side` + SHIFT tokens a side: a cut goes where it parts the least content, near where it would
    make them equal. The question does not count: all find the same regions.
    """
    across = (held[1:] & held[:-1]).sum(1)
    along = (held[:, 1:] & held[:, :-1]).sum(0)
    return tuple(
        Region(top, left, bottom - top, right - left)
        for top, bottom in _cuts(across, side)
        for left, right in _cuts(along, side)
    )


def _cuts(parted: NDArray[np.int_], side: int) -> list[tuple[int, int]]:
    """parted: pairs of cells with content that the cut before cell 1, 2, ... parts."""
    length = len(parted) + 1
    count, shift = -(-length // side), min(SHIFT, side // 4)
    edges = [0]
    for number in range(1, count):
        equal = length * number // count
        last = min(equal + shift, edges[-1] + side + shift)
        near = sorted(range(equal - shift, last + 1), key=lambda edge: abs(edge - equal))
        edges.append(min(near, key=lambda edge: parted[edge - 1]))
    edges.append(length)
    return list(zip(edges, edges[1:], strict=False))
