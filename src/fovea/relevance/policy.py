"""Turns relevance into a layout: which regions are encoded, at which resolution, with how many tokens.

A large image is laid out as a view of the whole at low resolution, and regions. The tension between compress
and particularize divides the total between them. A region that the question is about gets the tokens with
which it can be read, before others get any; if it is too large, it is cut around its peak. A region whose
content fits its budget is encoded at native resolution, and its blank cells are left out. Any other region is
encoded at a lower resolution. A small image, or one that the question needs as a whole, is one region at
native resolution, and some of its tokens are kept: a lower resolution costs such images more accuracy
(benchmarks/LOG.md). If the total is too small for regions, the image is one region at a low resolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fovea.relevance import attending
from fovea.relevance.realizing import (
    SIDE,
    Layout,
    Region,
    Shape,
    View,
    cut_out,
    partition,
    shape_within,
    token_places,
    top_tokens,
    view,
    view_at,
    whole,
)
from fovea.relevance.texture import Map, Mask

CONTENT, SALIENCE = 0.08, 0.35
"""A cell has content if its propositional value is above CONTENT or its perspectival value above SALIENCE."""
LARGE_IMAGE = 512
"""An image with at least so many cells is large: it is encoded as regions, beside a view of the whole."""
LOOK, LOOK_SHARE = 192, 8
"""The view of a large image that the model looks at has LOOK tokens, or one for LOOK_SHARE cells if that is
more."""
ONE_REGION_COMPRESS = 0.7
"""From this compress tension on, a large image is one region, too, because the question needs all of it."""
MOST_CUTS = 3
"""Most regions that are cut, because each part is encoded on its own."""
ASKED = 0.3
"""A cell is asked about if it has so much of the highest participatory value of the image."""
LEAST_CUT = 4
"""Fewest cells with content for which a part of a region is cut out."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The layout of an image, and the reasons for it, region by region.

    layout: the views that are encoded, with their tokens.
    regions: all regions, in reading order; the view of the whole is not among them.
    scores: relevance of each region, in [0, 1].
    demands: how many tokens of each region have content.
    budgets: how many tokens each region gets.
    full: tokens of the image if all were kept.
    """

    layout: Layout
    regions: tuple[Region, ...]
    scores: tuple[float, ...]
    demands: tuple[int, ...]
    budgets: tuple[int, ...]
    full: int


@dataclass(frozen=True, slots=True)
class Cells:
    """Maps of every cell by which an image is laid out, each (rows, columns).

    relevance: in [0, 1].
    content: whether the cell has content.
    asked: the participatory map, in [0, 1].
    detail: resolution per side at which the cell can still be read, as a share of the native one.
    """

    relevance: Map
    content: Mask
    asked: Map
    detail: Map


def content_mask(propositional: Map, perspectival: Map) -> Mask:
    """Whether each cell has content, (rows, columns)."""
    return (propositional > CONTENT) | (perspectival > SALIENCE)


def is_one_region(grid: Shape, compress: float) -> bool:
    """Whether an image is one region at native resolution: it is small, or the question needs all of it."""
    return grid[0] * grid[1] < LARGE_IMAGE or compress >= ONE_REGION_COMPRESS


def first_view(grid: Shape, total: int, compress: float, demand: int) -> Shape:
    """Rows and columns of the view of the whole, in tokens. That view is the first one of the layout.

    If the total has room for it beside all content, it is the view that the model looked at, which is
    encoded already.

    demand: how many cells have content.
    """
    rows, columns = grid
    if is_one_region(grid, compress):
        return grid
    own, looked = shape_within(rows, columns, attending.whole_tokens(total, compress)), look_shape(grid)
    area = looked[0] * looked[1]
    return looked if own[0] * own[1] < area <= total - demand else own


def look_shape(grid: Shape) -> Shape:
    """Rows and columns of the view of the whole that the model looks at, in tokens.

    A small image is looked at as it is.
    """
    rows, columns = grid
    if rows * columns < LARGE_IMAGE:
        return grid
    return shape_within(rows, columns, max(LOOK, rows * columns // LOOK_SHARE))


def attend(cells: Cells, total: int, compress: float = 0.5, side: int = SIDE) -> Allocation:
    """Lay out an image with exactly `total` tokens.

    total: tokens, at least one and fewer than cells; otherwise ValueError is raised.
    compress: the tension between compress and particularize, in [0, 1].
    side: longest side of a region with content, in tokens.
    """
    grid, count = cells.relevance.shape, cells.relevance.size
    if not 0 < total < count:
        raise ValueError(f"{total} of {count} tokens cannot be chosen; accepted: 1 to {count - 1}")
    shape = first_view(grid, total, compress, int(cells.content.sum()))
    if shape[0] * shape[1] >= total:
        return _one_region(cells, total, shape)
    first = View(whole(*grid), shape, tuple(range(shape[0] * shape[1])))
    divided = _divide(partition(cells.content, side), cells, total - first.tokens, MOST_CUTS)
    first = _without(first, _shown_natively(cells, *divided))
    # Further cuts could take tokens from the regions that the first view no longer shows.
    regions, scores, demands, budgets = _divide(divided[0], cells, total - first.tokens, 0)
    views = [
        view(region, budget, cells.relevance, cells.content)
        for region, budget in zip(regions, budgets, strict=True)
        if budget
    ]
    return Allocation(Layout(grid, (first, *views)), regions, scores, demands, budgets, count)


def _shown_natively(
    cells: Cells,
    regions: tuple[Region, ...],
    scores: tuple[float, ...],
    demands: tuple[int, ...],
    budgets: tuple[int, ...],
) -> Mask:
    """The cells of regions that are asked about and shown at native resolution."""
    shown = np.zeros(cells.relevance.shape, bool)
    for region, demand, budget in zip(regions, demands, budgets, strict=True):
        if budget >= demand > 0 and (cells.asked[region.cells] >= ASKED).any():
            shown[region.cells] = True
    return shown


def _without(first: View, shown: Mask) -> View:
    """The view of the whole without the tokens whose cell is shown natively, which would say it twice."""
    places = token_places(first.region, first.shape)
    kept = np.flatnonzero(~shown[places[:, 0], places[:, 1]])
    if 2 * len(kept) < first.tokens:  # there must remain a view of the whole
        return first
    return View(first.region, first.shape, tuple(kept.tolist()))


def _divide(
    regions: tuple[Region, ...], cells: Cells, total: int, most_cuts: int
) -> tuple[tuple[Region, ...], tuple[float, ...], tuple[int, ...], tuple[int, ...]]:
    """Divide `total` tokens among regions. Returns the fields of `Allocation` from `regions` to `budgets`.

    If a region that is asked about does not get what it needs, it is cut around its peak, and the tokens are
    divided again. At most `most_cuts` regions are cut.
    """
    about = cells.asked >= ASKED
    for cuts in range(most_cuts + 1):
        natives = [region.tokens for region in regions]
        places = [region.cells for region in regions]
        demands = tuple(int(cells.content[place].sum()) for place in places)
        scores = tuple(score(cells.relevance[place], about[place]) for place in places)
        needs = [need(cells.content[place], about[place], cells.detail[place]) for place in places]
        budgets = attending.allocate(scores, natives, total, demands, needs)
        index, held = attending.find_cut(scores, needs, budgets)
        if held < LEAST_CUT or cuts == most_cuts:
            break
        parts = cut_out(regions[index], cells.relevance, cells.content, held)
        regions = tuple(sorted((*regions[:index], *parts, *regions[index + 1 :])))
    return regions, scores, demands, budgets


def need(content: Mask, about: Mask, level: Map) -> int:
    """Tokens with which a region that is asked about can be read; 0: it is not asked about.

    All of its content is shown at the highest resolution that a cell asked about needs.

    content, about: of the region's cells. level: resolution per side at which each of them can be read.
    """
    held = content & about
    if not held.any():
        return 0
    return math.ceil(int(content.sum()) * float(level[held].max()) ** 2 - 1e-6)


def score(relevance: Map, about: Mask | None = None) -> float:
    """Relevance of a region: the mean of its highest quarter of cells, or of the cells that are asked about.

    With the mean of all cells, a small thing in an empty region would hardly count.

    relevance: of the region's cells, any shape. about: whether each is asked about; None: none is.
    """
    values = np.sort(relevance.ravel())[::-1]
    quarter = float(values[: max(1, len(values) // 4)].mean())
    if about is None or not about.any():
        return quarter
    return max(quarter, float(relevance[about].mean()))


def _one_region(cells: Cells, total: int, shape: Shape) -> Allocation:
    """Lay out an image as one region, encoded at `shape`."""
    grid, count = cells.relevance.shape, cells.relevance.size
    region = whole(*grid)
    layout = Layout(grid, (view_at(region, shape, total, cells.relevance),))
    return Allocation(layout, (region,), (1.0,), (int(cells.content.sum()),), (total,), count)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the cells of a picture lie on its tiles, without the border that pads it to whole tiles.

    Models that cut an image into tiles of a fixed size always get the view of the whole. Each row of the
    picture ends in a newline token, which belongs to the row's last tile. Its relevance is that of its row.

    rows, columns: cells of the picture.
    side: side of a tile, in cells.
    top, left: cells of border above and left of the picture.
    base: tokens of the view of the whole, which come first.
    """

    rows: int
    columns: int
    side: int
    top: int
    left: int
    base: int

    @property
    def regions(self) -> tuple[Region, ...]:
        """One region per tile that holds cells of the picture, in reading order.

        They cover the grid of the picture with its newlines, (rows, columns + 1).
        """
        down, across = self._cuts(self.rows, self.top), self._cuts(self.columns, self.left)
        across[-1] = across[-1][0], self.columns + 1
        return tuple(
            Region(start, begin, stop - start, end - begin) for start, stop in down for begin, end in across
        )

    def _cuts(self, length: int, margin: int) -> list[tuple[int, int]]:
        tiles = range(margin // self.side, -(-(margin + length) // self.side))
        return [
            (max(0, tile * self.side - margin), min(length, (tile + 1) * self.side - margin))
            for tile in tiles
        ]


def attend_tiles(cells: Cells, total: int, tiling: Tiling) -> Allocation:
    """Choose tiles and their cells, `total` tokens together.

    The layout's first view is the whole. The others are tiles, in the grid of the picture with its newlines.

    cells: of the picture, without newlines.
    total: tokens, including `tiling.base`, and more than that; otherwise ValueError is raised.
    """
    if total <= tiling.base:
        raise ValueError(f"{total} tokens are not more than the {tiling.base} of the view of the whole")
    ends = cells.relevance.mean(1, keepdims=True)
    relevance = np.concatenate((cells.relevance, ends), axis=1)
    content = np.concatenate((cells.content, cells.content.any(1, keepdims=True)), axis=1)
    regions = tiling.regions
    natives = [region.tokens for region in regions]
    demands = [int(content[region.cells].sum()) for region in regions]
    scores = [score(relevance[region.cells]) for region in regions]
    budgets = attending.allocate(scores, natives, total - tiling.base, demands, demands)
    views = [View(whole(*relevance.shape), (1, tiling.base), tuple(range(tiling.base)))]
    for region, budget in zip(regions, budgets, strict=True):
        if budget:
            indices = top_tokens(relevance[region.cells].ravel(), budget)
            views.append(View(region, (region.rows, region.columns), indices))
    layout = Layout((relevance.shape[0], relevance.shape[1]), tuple(views))
    full = tiling.base + relevance.size
    return Allocation(layout, regions, tuple(scores), tuple(demands), budgets, full)


def kept_tokens(allocation: Allocation, tiling: Tiling) -> list[int]:
    """Indices of the kept tokens among all tokens of the image, ascending.

    All tokens are those of the view of the whole, then the picture's, row by row, each row with its newline.
    """
    columns = tiling.columns + 1
    indices = list(range(tiling.base))
    for tile in allocation.layout.views[1:]:
        region = tile.region
        for cell in tile.token_indices:
            row, column = divmod(cell, region.columns)
            indices.append(tiling.base + (region.row + row) * columns + region.column + column)
    return sorted(indices)


def needed_tiles(allocation: Allocation, tiling: Tiling) -> list[int]:
    """Indices into `tiling.regions` of the tiles with at least one kept cell. Newlines do not count."""
    views = {view.region: view for view in allocation.layout.views[1:]}
    numbers = []
    for number, region in enumerate(allocation.regions):
        view = views.get(region)
        if view is not None and any(
            region.column + cell % region.columns < tiling.columns for cell in view.token_indices
        ):
            numbers.append(number)
    return numbers
