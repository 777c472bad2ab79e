"""An image's grid of visual tokens cut into regions, each of which gets a level of detail of its own."""

from __future__ import annotations

from dataclasses import dataclass

LARGE, SMALL = 14, 9
"""Sides of a region in tokens: of large images, and of those too small to be cut into several of the former. 14x14 is the
documents' level of 200 tokens; in smaller regions what is written is cut more often, and read less well (benchmarks/LOG.md)."""
FEW_TOKENS = 512


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


def partition(rows: int, columns: int, side: int | None = None) -> tuple[Region, ...]:
    """Regions of at most `side` tokens a side, as equal as they can be, in reading order; they tile the grid.

    side: None for what suits a grid of that size.
    """
    side = side or (LARGE if rows * columns >= FEW_TOKENS else SMALL)
    return tuple(
        Region(top, left, bottom - top, right - left)
        for top, bottom in _cuts(rows, side)
        for left, right in _cuts(columns, side)
    )


def _cuts(length: int, side: int) -> list[tuple[int, int]]:
    count = -(-length // side)
    edges = [length * index // count for index in range(count + 1)]
    return list(zip(edges, edges[1:], strict=False))
