"""Relevance for models that cut an image into tiles of fixed size: chooses the tiles and their cells.

The view of the whole is always kept. Tiles are regions with one resolution, their own. Each row of the
picture ends in a newline token. It belongs to the row's last tile, and its relevance is the mean of its row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fovea.relevance import attending
from fovea.relevance.policy import Allocation, score
from fovea.relevance.realizing import Layout, View, top_tokens, whole
from fovea.relevance.regions import Region
from fovea.relevance.texture import Map, Mask


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the cells of a picture lie on its tiles, without the border that pads it to whole tiles.

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


def attend_tiles(relevance: Map, content: Mask, total: int, tiling: Tiling) -> Allocation:
    """Choose tiles and their cells, `total` tokens together.

    The layout's first view is the whole. The others are tiles, in the grid of the picture with its newlines.

    relevance, content: of the picture's cells, (rows, columns).
    total: tokens, including `tiling.base`, and more than that; otherwise ValueError is raised.
    """
    if total <= tiling.base:
        raise ValueError(f"{total} tokens are not more than the {tiling.base} of the view of the whole")
    ends = relevance.mean(1, keepdims=True)
    relevance = np.concatenate((relevance, ends), axis=1)
    content = np.concatenate((content, content.any(1, keepdims=True)), axis=1)
    regions = tiling.regions
    natives = [region.tokens for region in regions]
    demands = [int(content[region.cells].sum()) for region in regions]
    scores = [score(relevance[region.cells]) for region in regions]
    budgets = attending.allocate(scores, natives, total - tiling.base, "sharp", demands)
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
    for view in allocation.layout.views[1:]:
        region = view.region
        for cell in view.token_indices:
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
