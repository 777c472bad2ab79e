"""From budgets to views: what is cut out of an image, at which size it is encoded, and where its tokens stand.

The whole is seen once at low resolution, and every region that has a budget at a resolution of its own. Views of one shape
are encoded together. Every token knows its true place: its centre in the grid that the whole
image has at full resolution (for M-RoPE), and its patches' places there (for towers that learned positions).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fovea.relevance.regions import Region
from fovea.relevance.texture import Map

Index = NDArray[np.int64]
Shape = tuple[int, int]
ASPECT = 2.0
"""How much stretching counts against area: twice as wide is worse than four times as many tokens, or a quarter of them."""


@dataclass(frozen=True, slots=True)
class View:
    """A region at `shape` (rows, columns) tokens. kept: which of those are handed on, ascending."""

    region: Region
    shape: Shape
    kept: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.kept)

    @property
    def native(self) -> bool:
        return self.shape == (self.region.rows, self.region.columns)


@dataclass(frozen=True, slots=True)
class Layout:
    """What is shown of an image of `grid` (rows, columns) tokens: the whole first, then regions in reading order."""

    grid: Shape
    views: tuple[View, ...]

    @property
    def tokens(self) -> int:
        return sum(view.tokens for view in self.views)

    def places(self) -> Index:
        """(tokens, 2): row and column in the full grid."""
        return np.concatenate([token_places(view.region, view.shape)[list(view.kept)] for view in self.views])


def whole(rows: int, columns: int) -> Region:
    return Region(0, 0, rows, columns)


def shape_within(rows: int, columns: int, tokens: int) -> Shape:
    """A large shape of nearly the same aspect that has at most `tokens`; at least 1x1."""
    best = (1, 1)
    for down in range(1, rows + 1):
        across = min(columns, tokens // down)
        for shape in ((down, across), (down, min(across, max(1, round(down * columns / rows))))):
            if shape[1] and _merit(shape, rows, columns) > _merit(best, rows, columns):
                best = shape
    return best


def shape_holding(rows: int, columns: int, tokens: int) -> Shape:
    """A small shape of nearly the same aspect that has at least `tokens`, of which the region carries as many."""
    best = (rows, columns)
    for down in range(1, rows + 1):
        across = -(-tokens // down)
        for shape in ((down, across), (down, max(across, round(down * columns / rows)))):
            if shape[1] <= columns and _cost(shape, rows, columns) < _cost(best, rows, columns):
                best = shape
    return best


def _merit(shape: Shape, rows: int, columns: int) -> float:
    """Of a shape that may not be larger: its area, and how little it stretches."""
    return math.log(shape[0] * shape[1]) - ASPECT * _stretch(shape, rows, columns)


def _cost(shape: Shape, rows: int, columns: int) -> float:
    """Of a shape that may not be smaller."""
    return math.log(shape[0] * shape[1]) + ASPECT * _stretch(shape, rows, columns)


def _stretch(shape: Shape, rows: int, columns: int) -> float:
    return abs(math.log(shape[0] * columns / (shape[1] * rows)))


def view(region: Region, tokens: int, worth: Map, *, native: bool) -> View:
    """The region's `tokens` worthiest: of all that it carries, or of the smallest resolution that holds so many.

    worth: of every cell of the full grid, (rows, columns).
    """
    carried = region.rows, region.columns
    return view_at(region, carried if native else shape_holding(*carried, tokens), tokens, worth)


def view_at(region: Region, shape: Shape, tokens: int, worth: Map) -> View:
    """The region's `tokens` worthiest of all that it has at `shape`; worth as in `view`."""
    places = token_places(region, shape)
    return View(region, shape, worthiest(worth[places[:, 0], places[:, 1]], tokens))


def token_places(region: Region, shape: Shape) -> Index:
    """(tokens of the shape, 2): the cell of the full grid that holds each token's centre, in reading order."""
    rows = np.floor(_line(region.row, region.rows, shape[0], 1) + 0.5).astype(np.int64)
    columns = np.floor(_line(region.column, region.columns, shape[1], 1) + 0.5).astype(np.int64)
    return np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)


def patch_fractions(view: View, grid: Shape, merge: int) -> NDArray[np.float32]:
    """(patches, 2) in [0, 1]: where each patch stands between the first and the last of the full grid of patches, down and
    across; in merge order: the merge x merge patches of a token are neighbours."""
    region, (rows, columns) = view.region, view.shape
    lines = (
        _line(region.row, region.rows, rows, merge) / max(grid[0] * merge - 1, 1),
        _line(region.column, region.columns, columns, merge) / max(grid[1] * merge - 1, 1),
    )
    table = np.stack(np.meshgrid(*(np.clip(line, 0, 1) for line in lines), indexing="ij"), axis=-1)
    table = table.reshape(rows, merge, columns, merge, 2).swapaxes(1, 2)
    return table.reshape(-1, 2).astype(np.float32)


def _line(start: int, length: int, count: int, merge: int) -> Map:
    """Centres of count * merge rows or columns of patches, in units of the full grid's patches."""
    return merge * start + (np.arange(count * merge) + 0.5) * (length / count) - 0.5


def worthiest(values: Map, count: int) -> tuple[int, ...]:
    """The `count` tokens with the highest values, ascending; among equals the earlier."""
    return tuple(np.sort(np.argsort(-values, kind="stable")[:count]).tolist())
