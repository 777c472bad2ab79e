"""What an image's relevance becomes: how much is shown of the whole, of each region, and at which resolution.

Small images are one region: blank cells are left out as long as all that has content stays, and else the whole is shown
smaller. Large ones are a thumbnail and regions: a region whose content fits its budget is encoded at native resolution
and loses its blank cells; one whose content does not is encoded at a lower level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fovea.relevance import attending
from fovea.relevance.balancing import Ways
from fovea.relevance.realizing import Layout, View, shape_within, view, whole
from fovea.relevance.regions import FEW_TOKENS, Region, partition
from fovea.relevance.texture import Map

Mask = NDArray[np.bool_]
Part = TypeVar("Part", bound=np.generic)
CONTENT, STANDING_OUT = 0.08, 0.35
"""From which propositional and perspectival knowledge on a cell counts as having content."""
ENOUGH = 0.9
"""Of the cells with content that have to stay, if the whole is not rather to be shown smaller."""


@dataclass(frozen=True, slots=True)
class Attended:
    """regions with their scores, demands and budgets in tokens; the view of the whole is not among them."""

    layout: Layout
    regions: tuple[Region, ...]
    scores: tuple[float, ...]
    demands: tuple[int, ...]
    budgets: tuple[int, ...]


def content(ways: Ways) -> Mask:
    """Cells that hold anything."""
    return (ways.propositional > CONTENT) | (ways.perspectival > STANDING_OUT)


def attend(
    worth: Map, held: Mask, total: int, policy: str = "thresholds", side: int | None = None
) -> Attended:
    """worth: relevance of each cell, (rows, columns) in [0, 1]. held: cells with content. total: tokens, fewer than cells.

    side: of a region, in tokens; None for what suits the image. The layout has exactly `total` tokens.
    """
    rows, columns = worth.shape
    if not 0 < total < worth.size:
        raise ValueError(f"{total} of {worth.size} tokens can not be chosen; accepted: 1 to {worth.size - 1}")
    if side is None and worth.size < FEW_TOKENS:
        return _as_one(worth, held, total)
    regions = partition(rows, columns, side)
    thumbnail = shape_within(rows, columns, attending.thumbnail_tokens(total))
    natives = [region.tokens for region in regions]
    demands = [int(_part(held, region).sum()) for region in regions]
    scores = [score(_part(worth, region)) for region in regions]
    room = total - thumbnail[0] * thumbnail[1]
    budgets = attending.allocate(scores, natives, room, policy, demands)
    views = [View(whole(rows, columns), thumbnail, tuple(range(thumbnail[0] * thumbnail[1])))]
    for region, budget, demand in zip(regions, budgets, demands, strict=True):
        if budget:
            views.append(view(region, budget, worth, native=budget >= demand))
    return Attended(Layout((rows, columns), tuple(views)), regions, tuple(scores), tuple(demands), budgets)


def score(worth: Map) -> float:
    """Of a region: the mean of its highest quarter, so that a small thing in an empty region counts."""
    values = np.sort(worth.ravel())[::-1]
    return float(values[: max(1, len(values) // 4)].mean())


def _as_one(worth: Map, held: Mask, total: int) -> Attended:
    region = whole(*worth.shape)
    demand = int(held.sum())
    shown = view(region, total, worth, native=total >= ENOUGH * demand)
    return Attended(Layout(worth.shape, (shown,)), (region,), (1.0,), (demand,), (total,))


def _part(values: NDArray[Part], region: Region) -> NDArray[Part]:
    return values[region.row : region.row + region.rows, region.column : region.column + region.columns]
