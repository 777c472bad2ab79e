"""Tokens at equal distances on the grid: one of the two baselines for all other methods."""

from __future__ import annotations

import math

import torch

from fovea.engine.reduce.base import ReducedTokens, ReductionInput, pick_tokens


def choose(image: ReductionInput, keep: int) -> ReducedTokens:
    return pick_tokens(image, torch.tensor(spread_cells(*image.grid, keep), device=image.embeds.device))


def spread_cells(rows: int, columns: int, keep: int) -> list[int]:
    """Choose `keep` cells of a grid: some rows at equal distances, and in each row cells at equal distances.

    The number of rows is chosen so that both distances are about equal. If `keep` is not a multiple of it,
    some rows have one cell more. Returns the numbers of the cells in raster order.
    """
    lines = round(math.sqrt(keep * rows / columns))
    lines = min(rows, keep, max(lines, -(-keep // columns)))
    cells = []
    for line in range(lines):
        row = (2 * line + 1) * rows // (2 * lines)
        count = (line + 1) * keep // lines - line * keep // lines
        cells += [row * columns + (2 * place + 1) * columns // (2 * count) for place in range(count)]
    return cells
