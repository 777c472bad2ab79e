"""What an image's relevance becomes: how much is shown of the whole, of each region, and at which resolution.

How much of the total shows the whole is the tension between compressing and particularizing. Large images are the whole at
low resolution, and regions: one whose content fits its budget is encoded at native resolution and loses its blank cells; one
whose content does not is encoded at a lower level. Small images, and those of which all has to be seen, are one region at
native resolution, of which some tokens are kept: shown smaller, they lose more (benchmarks/LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fovea.relevance import attending
from fovea.relevance.balancing import Ways
from fovea.relevance.realizing import Layout, Shape, View, shape_within, view, view_at, whole
from fovea.relevance.regions import SIDE, Region, partition
from fovea.relevance.texture import Map, Mask

CONTENT, STANDING_OUT = 0.08, 0.35
"""From which propositional and perspectival knowledge on a cell counts as having content."""
ONE_VIEW = 512
"""Cells from which an image is large: regions beside a view of the whole, each with a context of its own."""
ALL_OF_IT = 0.7
"""From which compression on all of a large image has to be seen, and no region alone."""


@dataclass(frozen=True, slots=True)
class Attended:
    """regions with their scores, demands and budgets in tokens; the view of the whole is not among them. full: tokens of the
    image where nothing is left out."""

    layout: Layout
    regions: tuple[Region, ...]
    scores: tuple[float, ...]
    demands: tuple[int, ...]
    budgets: tuple[int, ...]
    full: int


def content(ways: Ways) -> Mask:
    """Cells that hold anything."""
    return (ways.propositional > CONTENT) | (ways.perspectival > STANDING_OUT)


def first_view(grid: Shape, total: int, compress: float) -> Shape:
    """The shape at which the whole is seen: what the layout begins with."""
    rows, columns = grid
    if rows * columns < ONE_VIEW or compress >= ALL_OF_IT:
        return grid
    return shape_within(rows, columns, attending.whole_tokens(total, compress))


def attend(
    worth: Map,
    held: Mask,
    total: int,
    compress: float = 0.5,
    policy: str = "thresholds",
    side: int = SIDE,
) -> Attended:
    """worth: relevance of each cell, (rows, columns) in [0, 1]. held: cells with content. total: tokens, fewer than cells.

    side: of a region, in tokens. The layout has exactly `total` tokens.
    """
    grid = worth.shape[0], worth.shape[1]
    if not 0 < total < worth.size:
        raise ValueError(f"{total} of {worth.size} tokens can not be chosen; accepted: 1 to {worth.size - 1}")
    shape = first_view(grid, total, compress)
    if shape[0] * shape[1] >= total:
        return _as_one(worth, held, total, shape)
    regions = partition(held, side)
    natives = [region.tokens for region in regions]
    demands = [int(held[region.cells].sum()) for region in regions]
    scores = [score(worth[region.cells]) for region in regions]
    budgets = attending.allocate(scores, natives, total - shape[0] * shape[1], policy, demands)
    views = [View(whole(*grid), shape, tuple(range(shape[0] * shape[1])))]
    for region, budget, demand in zip(regions, budgets, demands, strict=True):
        if budget:
            views.append(view(region, budget, worth, native=budget >= demand))
    return Attended(Layout(grid, tuple(views)), regions, tuple(scores), tuple(demands), budgets, worth.size)


def score(worth: Map) -> float:
    """Of a region: the mean of its highest quarter, so that a small thing in an empty region counts."""
    values = np.sort(worth.ravel())[::-1]
    return float(values[: max(1, len(values) // 4)].mean())


def _as_one(worth: Map, held: Mask, total: int, shape: Shape) -> Attended:
    region = whole(*worth.shape)
    shown = view_at(region, shape, total, worth)
    return Attended(
        Layout(worth.shape, (shown,)), (region,), (1.0,), (int(held.sum()),), (total,), worth.size
    )
