"""Every so many tokens of the grid: the first of the two methods that any other has to beat."""

from __future__ import annotations

import math

import torch

from fovea.engine.reduce.base import Reduced, Seen, picked


def choose(seen: Seen, keep: int) -> Reduced:
    return picked(seen, torch.tensor(spread(*seen.grid, keep), device=seen.embeds.device))


def spread(rows: int, columns: int, keep: int) -> list[int]:
    """`keep` cells of a grid, in raster order: some of its rows at equal distances, and in each as many at equal distances.

    As many rows as make the two distances alike. Where `keep` is not a multiple of them, some rows hold one cell more.
    """
    lines = round(math.sqrt(keep * rows / columns))
    lines = min(rows, keep, max(lines, -(-keep // columns)))
    cells = []
    for line in range(lines):
        row = (2 * line + 1) * rows // (2 * lines)
        room = (line + 1) * keep // lines - line * keep // lines
        cells += [row * columns + (2 * place + 1) * columns // (2 * room) for place in range(room)]
    return cells
