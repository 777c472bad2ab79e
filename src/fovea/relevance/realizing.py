"""Turns budgets into views: parts of an image, the size of each for the encoder, its tokens' positions.

The whole is encoded once at low resolution, and every region with a budget at a resolution of its own. Views
of one shape can be encoded together. Every token keeps its true position: for M-RoPE, the cell of the image's
full grid that holds its centre; for towers with learned positions, the positions of its patches in the full
grid of patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.relevance.texture import Map, Mask

SIDE = 14
"""Longest side of a region, in tokens. Smaller regions lack their surround, and the model reads them less
well (benchmarks/LOG.md)."""
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
    """Cut the grid into regions by what is there. They are in reading order and cover the grid exactly.

    Like an XY-cut (Nagy and Seth, 1984), it cuts a region in two as long as a side is longer than `side`. The
    cut is in the middle half of the longer side, where it separates the least content; between blank cells if
    there are some; and as near the middle as that allows. The question plays no part, so that all questions
    about an image get the same regions.

    content: whether a cell has content, (rows, columns).
    side: longest side of a region, in tokens.
    """
    done: list[Region] = []
    left = [whole(*content.shape)]
    while left:
        region = left.pop()
        if max(region.rows, region.columns) <= side:
            done.append(region)
        else:
            left += _halves(region, content[region.cells])
    return tuple(sorted(done))


def _halves(region: Region, held: Mask) -> tuple[Region, Region]:
    """Cut a region across its longer side. held: whether its cells have content."""
    wide = region.columns > region.rows
    lines = held.T if wide else held
    length = len(lines)
    separated = (lines[1:] & lines[:-1]).sum(1)
    blank = np.logical_not(np.any(lines, axis=1))
    near = range(max(1, length // 4), min(length, length - length // 4 + 1))

    def cost(at: int) -> tuple[int, int, int]:
        """Content that a cut before line `at` separates; -1 between blank lines; distance to the middle."""
        before, after = blank[:at][::-1], blank[at:]
        room = min(_run(before), _run(after), 1)
        return int(separated[at - 1]), -room, abs(2 * at - length)

    at = min(near, key=cost)
    row, column, rows, columns = region.row, region.column, region.rows, region.columns
    if wide:
        return Region(row, column, rows, at), Region(row, column + at, rows, columns - at)
    return Region(row, column, at, columns), Region(row + at, column, rows - at, columns)


def _run(values: Mask) -> int:
    """How many values are true before the first that is not."""
    return len(values) if values.all() else int(np.argmin(values))


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


Index = NDArray[np.int64]
Shape = tuple[int, int]
ASPECT = 2.0
"""Weight of a distorted aspect ratio against area, both as logarithms: a ratio that is wrong by a factor of 2
costs as much as a factor of 4 in the number of tokens."""


@dataclass(frozen=True, slots=True)
class View:
    """A region at the resolution at which it is encoded, and which of its tokens the decoder gets.

    region: the rectangle of the full grid that is shown.
    shape: rows and columns of tokens that the encoder makes of it.
    token_indices: the tokens that are kept, as indices in reading order, ascending.
    """

    region: Region
    shape: Shape
    token_indices: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens that are kept."""
        return len(self.token_indices)

    @property
    def native(self) -> bool:
        """Whether the region is encoded at its native resolution."""
        return self.shape == (self.region.rows, self.region.columns)


@dataclass(frozen=True, slots=True)
class Layout:
    """The views of an image that are encoded.

    grid: rows and columns of tokens of the whole image at full resolution.
    views: the whole first, then regions in reading order.
    """

    grid: Shape
    views: tuple[View, ...]

    @property
    def tokens(self) -> int:
        return sum(view.tokens for view in self.views)

    def places(self) -> Index:
        """Row and column of each kept token in the full grid, (tokens, 2)."""
        return np.concatenate(
            [token_places(view.region, view.shape)[list(view.token_indices)] for view in self.views]
        )


def whole(rows: int, columns: int) -> Region:
    """The region that is all of a grid."""
    return Region(0, 0, rows, columns)


def shape_within(rows: int, columns: int, tokens: int) -> Shape:
    """A large shape of at most `tokens` tokens (at least 1x1), of nearly the aspect ratio rows / columns."""
    best = (1, 1)
    for down in range(1, rows + 1):
        across = min(columns, tokens // down)
        for shape in ((down, across), (down, min(across, max(1, round(down * columns / rows))))):
            if shape[1] and _merit(shape, rows, columns) > _merit(best, rows, columns):
                best = shape
    return best


def shape_holding(rows: int, columns: int, tokens: int) -> Shape:
    """A small shape of at least `tokens` tokens, of nearly the aspect ratio rows / columns.

    tokens: not more than rows * columns.
    """
    best = (rows, columns)
    for down in range(1, rows + 1):
        across = -(-tokens // down)
        for shape in ((down, across), (down, max(across, round(down * columns / rows)))):
            if shape[1] <= columns and _cost(shape, rows, columns) < _cost(best, rows, columns):
                best = shape
    return best


def _merit(shape: Shape, rows: int, columns: int) -> float:
    """Quality of a shape that has an upper limit: a larger area and a smaller distortion are better."""
    return math.log(shape[0] * shape[1]) - ASPECT * _stretch(shape, rows, columns)


def _cost(shape: Shape, rows: int, columns: int) -> float:
    """Cost of a shape that has a lower limit: a smaller area and a smaller distortion are better."""
    return math.log(shape[0] * shape[1]) + ASPECT * _stretch(shape, rows, columns)


def _stretch(shape: Shape, rows: int, columns: int) -> float:
    return abs(math.log(shape[0] * columns / (shape[1] * rows)))


def view(region: Region, tokens: int, relevance: Map, content: Mask) -> View:
    """A view of a region that keeps `tokens` tokens: those with content first, the most relevant first.

    With enough tokens for its content, the region is encoded at native resolution. With fewer, it is encoded
    at the lowest resolution at which its content has so many tokens. Its blank cells are left out in both
    cases.

    relevance: of every cell of the full grid, (rows, columns) in [0, 1].
    content: whether each cell has content, (rows, columns).
    """
    held = int(content[region.cells].sum())
    cells = region.tokens if tokens >= held else -(-tokens * region.tokens // held)
    shape = shape_holding(region.rows, region.columns, cells)
    return view_at(region, shape, tokens, relevance + 2 * content)


def view_at(region: Region, shape: Shape, tokens: int, relevance: Map) -> View:
    """A view of a region at `shape` that keeps its `tokens` most relevant tokens. relevance: as in `view`."""
    places = token_places(region, shape)
    return View(region, shape, top_tokens(relevance[places[:, 0], places[:, 1]], tokens))


def token_places(region: Region, shape: Shape) -> Index:
    """Row and column of the full grid's cell that holds each token's centre, in reading order.

    The result is (shape[0] * shape[1], 2).
    """
    # In whole numbers: floating-point division puts some centres that lie on a border one cell too early.
    rows = region.row + (2 * np.arange(shape[0]) + 1) * region.rows // (2 * shape[0])
    columns = region.column + (2 * np.arange(shape[1]) + 1) * region.columns // (2 * shape[1])
    return np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)


def patch_fractions(view: View, grid: Shape, merge: int, *, corners: bool = True) -> NDArray[np.float32]:
    """Position of each patch of a view in the full grid of patches, (patches, 2) in [0, 1].

    The two numbers are down and across. Patches are in merge order: the merge x merge patches of a token are
    consecutive.

    grid: rows and columns of the full grid, in tokens.
    merge: patches per side of a token.
    corners: True: 0 is the centre of the full grid's first patch, 1 that of its last. False: 0 and 1 are the
        edges of the full grid.
    """
    region, (rows, columns) = view.region, view.shape
    lines = (
        _fractions(_line(region.row, region.rows, rows, merge), grid[0] * merge, corners),
        _fractions(_line(region.column, region.columns, columns, merge), grid[1] * merge, corners),
    )
    table = np.stack(np.meshgrid(*lines, indexing="ij"), axis=-1)
    table = table.reshape(rows, merge, columns, merge, 2).swapaxes(1, 2)
    return table.reshape(-1, 2).astype(np.float32)


def _fractions(line: Map, count: int, corners: bool) -> Map:
    """Turn centres in units of the full grid's patches into fractions. count: its patches along the axis."""
    fractions = line / max(count - 1, 1) if corners else (line + 0.5) / count
    return np.clip(fractions, 0, 1)


def _line(start: int, length: int, count: int, merge: int) -> Map:
    """Centres of count * merge rows or columns of patches, in units of the full grid's patches.

    start, length: the region along this axis, in tokens.
    count: the view's tokens along it.
    """
    return merge * start + (np.arange(count * merge) + 0.5) * (length / count) - 0.5


def top_tokens(values: Map, count: int) -> tuple[int, ...]:
    """The `count` tokens with the highest values, ascending; among equals the earlier."""
    return tuple(np.sort(np.argsort(-values, kind="stable")[:count]).tolist())
