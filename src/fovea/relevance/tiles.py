"""Relevance for models that cut an image into tiles of fixed size: which tiles are worth encoding, and which of their cells.

The view of the whole is always kept. Tiles are regions that have one level, their own; a row of the picture ends in a newline
token, which belongs to its last tile and is worth what its row is worth on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fovea.relevance import attending
from fovea.relevance.policy import Attended, score
from fovea.relevance.realizing import Layout, View, whole, worthiest
from fovea.relevance.regions import Region
from fovea.relevance.texture import Map, Mask


@dataclass(frozen=True, slots=True)
class Tiling:
    """A picture of (rows, columns) cells, without its border, on tiles of `side` cells. top, left: cells of border that were
    cut off before the first. base: tokens of the view of the whole, which come first."""

    rows: int
    columns: int
    side: int
    top: int
    left: int
    base: int

    @property
    def regions(self) -> tuple[Region, ...]:
        """Of the picture with its newlines, (rows, columns + 1), one for each tile, in reading order."""
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


def attend_tiles(worth: Map, held: Mask, total: int, tiling: Tiling) -> Attended:
    """worth, held: of the cells, (rows, columns). total: tokens, more than those of the whole, which are included.

    The layout's first view is the whole; the others are tiles, as cells of the picture with its newlines.
    """
    if total <= tiling.base:
        raise ValueError(f"{total} tokens are not more than the {tiling.base} of the view of the whole")
    ends = worth.mean(1, keepdims=True)
    worth = np.concatenate((worth, ends), axis=1)
    held = np.concatenate((held, held.any(1, keepdims=True)), axis=1)
    regions = tiling.regions
    natives = [region.tokens for region in regions]
    demands = [int(held[region.cells].sum()) for region in regions]
    scores = [score(worth[region.cells]) for region in regions]
    budgets = attending.allocate(scores, natives, total - tiling.base, "sharp", demands)
    views = [View(whole(*worth.shape), (1, tiling.base), tuple(range(tiling.base)))]
    for region, budget in zip(regions, budgets, strict=True):
        if budget:
            kept = worthiest(worth[region.cells].ravel(), budget)
            views.append(View(region, (region.rows, region.columns), kept))
    layout = Layout((worth.shape[0], worth.shape[1]), tuple(views))
    full = tiling.base + worth.size
    return Attended(layout, regions, tuple(scores), tuple(demands), budgets, full)


def kept_tokens(attended: Attended, tiling: Tiling) -> list[int]:
    """Numbers of the kept tokens in the row of all: the whole's, then the picture's, line by line, each with its newline."""
    columns = tiling.columns + 1
    found = list(range(tiling.base))
    for view in attended.layout.views[1:]:
        region = view.region
        for cell in view.kept:
            row, column = divmod(cell, region.columns)
            found.append(tiling.base + (region.row + row) * columns + region.column + column)
    return sorted(found)


def needed_tiles(attended: Attended, tiling: Tiling) -> list[int]:
    """Numbers of the tiles, in reading order, of which any cell but newlines is kept."""
    shown = {view.region: view for view in attended.layout.views[1:]}
    numbers = []
    for number, region in enumerate(attended.regions):
        view = shown.get(region)
        if view is not None and any(
            region.column + cell % region.columns < tiling.columns for cell in view.kept
        ):
            numbers.append(number)
    return numbers
