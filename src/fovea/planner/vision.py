"""The work of the vision tower for one image, from the number of its visual tokens alone.

The engine counts the same rows from the plan of an image (`VisionLanguageModel.visual_shape`). Where the
number of tokens decides them, both agree. Where it does not, this is an estimate:

    windows at the edges of a picture are smaller than others (Qwen2.5-VL): without its aspect the mean loss
        is subtracted; with it the grid is the factors of the number of tokens that fit best
    patches beyond the last whole square have no token (LightOnOCR): they are left out
    tiles of one image have sizes of their own (MiniCPM-V): they are taken as equal
    padding inside tiles has no tokens (LLaVA-NeXT), or a picture with too many tokens is shrunk
        (LLaVA-OneVision): as many tiles are counted as the tokens could fill, which are too few
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fovea.planner.shape import ModelShape, Tower

Pictures = Sequence[tuple[float, float]]
"""Numbers of pictures, each with the patches of one of them."""


@dataclass(frozen=True, slots=True)
class EncoderWork:
    """Rows that each part of the tower computes for an image. They are whole numbers in most towers.

    patches: rows of the patch embedding.
    rows: rows of the blocks.
    projector_rows: rows of the projector.
    merged_rows: rows of the part "merged".
    pairs: pairs of rows that attend to each other, summed over all blocks. A block of another width than
        `Tower.hidden` counts in proportion to its width.
    """

    patches: float
    rows: float
    projector_rows: float
    merged_rows: float
    pairs: float


def encoder_work(shape: ModelShape, tokens: float, aspect: float | None = None) -> EncoderWork:
    """Return the work of encoding one image.

    tokens: rows of the encoder's output for this image, at least 1: its visual tokens, or, in models whose
        image states lie outside of the prompt (`shape.cross`), those states.
    aspect: width of the image through its height; None: it is not known. Only towers with windows read it.
    """
    tower = shape.tower
    found = pictures(tower, tokens)
    number = sum(count for count, _ in found)
    patches = sum(count * size for count, size in found)
    real = patches + number * tower.extra_rows
    full = sum(count * (size + tower.extra_rows) ** 2 for count, size in found)
    if tower.padded_rows:
        # Rows of padding attend to all others, and all others to them, but not to each other.
        full = 2 * real * tower.padded_rows - real**2
    windows = sum(count * _window_pairs(tower, size, aspect) for count, size in found)
    merged = sum(count * (size * tower.merged_rows_per_patch) ** 2 for count, size in found)
    return EncoderWork(
        patches,
        tower.padded_rows or real,
        patches * tower.projector_rows_per_patch + number * tower.projected_extra_rows,
        patches * tower.merged_rows_per_patch,
        tower.full_layers * full
        + tower.window_layers * windows
        + tower.merged_layers * tower.merged_pairs * merged,
    )


def pictures(tower: Tower, tokens: float) -> Pictures:
    """Return the pictures that an image of so many visual tokens becomes."""
    if tower.tiling == "whole":
        view = tower.view_tokens
        if tokens <= view:
            return ((1, tower.view_patches * tokens / view),)
        whole = (max(1, math.ceil((tokens - view) / tower.tile_tokens)), tower.tile_patches)
        return ((1, tower.view_patches), whole) if view else (whole,)
    if tower.tiling == "rest":
        tiles, rest = divmod(tokens, tower.tile_tokens)
        return (
            (tiles, tower.tile_tokens * tower.patches_per_token),
            (1.0 if rest else 0.0, rest * tower.patches_per_token),
        )
    count = max(1, round(tokens / tower.tile_tokens)) if tower.tiling == "equal" else 1
    return ((count, tokens / count * tower.patches_per_token),)


def _window_pairs(tower: Tower, patches: float, aspect: float | None) -> float:
    """Pairs of one block with windows in a picture of so many patches; 0: the tower has no such blocks."""
    if not tower.window_layers:
        return 0.0
    edge, side = math.sqrt(tower.window_rows), math.sqrt(patches)
    if tower.padded_windows:
        return (math.ceil(side / edge) * tower.window_rows) ** 2
    step = math.sqrt(tower.patches_per_token)
    tokens = patches / tower.patches_per_token
    if aspect is not None and tokens == int(tokens):
        rows, columns = _grid(int(tokens), aspect)
        return _squares(rows * step, edge) * _squares(columns * step, edge)
    if side <= edge:
        return patches**2
    # The mean of `_squares` over all remainders, which are multiples of the side of a visual token.
    return (side * edge - max(0.0, edge**2 - step**2) / 6) ** 2


def _squares(side: float, edge: float) -> float:
    """Sum of the squared lengths of the windows along a side: whole ones, and one that remains."""
    whole, rest = divmod(side, edge)
    return whole * edge**2 + rest**2


def _grid(tokens: int, aspect: float) -> tuple[int, int]:
    """Return the rows and columns of so many tokens whose ratio is nearest to columns / rows = aspect."""
    factors = (n for n in range(1, math.isqrt(tokens) + 1) if tokens % n == 0)
    grids = [grid for n in factors for grid in ((n, tokens // n), (tokens // n, n))]
    return min(grids, key=lambda grid: abs(math.log(grid[1] / grid[0] / aspect)))
