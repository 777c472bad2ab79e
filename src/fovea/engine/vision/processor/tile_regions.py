"""Prepares images for encoding region by region, for models with tiles: a region is a tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fovea.core.media import Image
from fovea.engine.vision.processor.anyres import Anyres, size_without_border
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan, expect_planned
from fovea.engine.vision.processor.pixels import picture, resize
from fovea.engine.vision.processor.surveys import survey_arrays
from fovea.engine.vision.processor.tower import Tower
from fovea.relevance.policy import Tiling


@dataclass(frozen=True, slots=True)
class TileRegions:
    """A `base.RegionProcessor` for tiles. The arrays are those of the plain image, and its survey.

    plain: prepares an image with all of its tokens.
    """

    anyres: Anyres
    tower: Tower
    plain: Callable[[Image, VisualPlan], ProcessedImage]

    @property
    def fewest_tokens(self) -> int:
        """The tokens of the view of the whole image, which is always kept, and one more."""
        return self.tower.rows(self.tower.side**2) + 1

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        expect_planned(image, plan)
        assert plan.reduction is not None
        tiles = tiling(plan, self.tower.side, plan.reduction.full_tokens)
        cell = self.anyres.edge // tiles.side
        size = tiles.rows * cell, tiles.columns * cell
        pixels = np.ascontiguousarray(resize(picture(image), *size, self.anyres.fit.resample))
        plain = self.plain(image, plan).arrays
        return ProcessedImage(image.identity, plan, {**plain, **survey_arrays(pixels, cell)})

    def whole(self, image: ProcessedImage) -> ProcessedImage:
        reduction = image.plan.reduction
        assert reduction is not None
        return replace(image, plan=replace(image.plan, tokens=reduction.full_tokens, reduction=None))

    def own_tokens(self, image: Image, plan: VisualPlan) -> int:
        """Half of all tokens, and at least `fewest_tokens`."""
        return max(self.fewest_tokens, plan.tokens // 2)


def tiling(plan: VisualPlan, side: int, full: int) -> Tiling:
    """The place of the picture in the grid of tiles.

    side: cells along a side of a tile.
    full: tokens of the plan without a reduction.
    """
    down, across = side * plan.grid[1], side * plan.grid[2]
    rows, columns = size_without_border(plan.height, plan.width, down, across)
    base = full - rows * (columns + 1)
    return Tiling(rows, columns, side, (down - rows) // 2, (across - columns) // 2, base)
