"""Prepares images for encoding region by region, where a region is any part of the image, or a tile.

A survey is the part of relevance that is computed from the pixels, before any question is known. A worker
thread computes the survey together with the pixels. The survey reaches the encoder as arrays of the
`ProcessedImage`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

from fovea.core.media import Image
from fovea.engine.vision.processor.anyres import Anyres, size_without_border
from fovea.engine.vision.processor.base import Arrays, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.pixels import picture, resize
from fovea.engine.vision.processor.settings import Tower
from fovea.relevance.enough import asks_for_part, enough_tokens
from fovea.relevance.pipeline import Survey, survey
from fovea.relevance.policy import Tiling
from fovea.relevance.texture import Texture

if TYPE_CHECKING:
    from fovea.engine.vision.processor.base import AnySizeProcessor


def survey_arrays(pixels: NDArray[np.uint8], cell: int) -> Arrays:
    """Survey an image. Returns the arrays that `ProcessedImage` describes. CPU-bound, some milliseconds.

    pixels: (height, width, 3) bytes; height and width are multiples of `cell`.
    cell: side in pixels of the square that becomes one visual token.
    """
    result = survey(pixels, cell)
    return {
        "channels": result.texture.channels,
        "luma": result.texture.luma,
        "propositional": result.propositional,
        "perspectival": result.perspectival,
    }


def read_survey(image: ProcessedImage, cell: int) -> Survey:
    """The survey in an image's arrays. cell: as for `survey_arrays`."""
    arrays = image.arrays
    texture = Texture(arrays["channels"], arrays["luma"], cell)
    return Survey(texture, arrays["propositional"], arrays["perspectival"])


@dataclass(frozen=True, slots=True)
class AnySizeRegions:
    """A `base.RegionProcessor` that keeps the pixels as bytes, from which any region can be cut out."""

    processor: AnySizeProcessor
    fewest_tokens: int = 1

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        plan.check(image)
        ((height, width),) = plan.sizes
        pixels = np.ascontiguousarray(resize(picture(image), height, width, self.processor.resample))
        arrays = {"rgb": pixels, **survey_arrays(pixels, self.processor.factor)}
        return ProcessedImage(image.identity, plan, arrays)

    def whole(self, image: ProcessedImage) -> ProcessedImage:
        reduction = image.plan.reduction
        assert reduction is not None
        plan = replace(image.plan, tokens=reduction.full_tokens, reduction=None)
        if "rgb" not in image.arrays:
            return replace(image, plan=plan)
        patches = self.processor.patches(image.arrays["rgb"])
        return replace(image, plan=plan, arrays={"pixel_values": patches})

    def enough_tokens(self, image: Image, plan: VisualPlan, question: str) -> int:
        """Number of tokens by `relevance.enough`, with a coarse survey."""
        if not asks_for_part(question):
            return plan.tokens
        coarse = survey_coarsely(self.processor, image, plan)
        return enough_tokens(question, coarse.propositional, coarse.perspectival)


def survey_coarsely(processor: AnySizeProcessor, image: Image, plan: VisualPlan) -> Survey:
    """Survey the image at half the height and width of its plan. CPU-bound, some milliseconds."""
    ((height, width),) = plan.sizes
    pixels = resize(picture(image), height // 2, width // 2, Resampling.BOX)
    return survey(np.ascontiguousarray(pixels), processor.factor // 2)


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
        plan.check(image)
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

    def enough_tokens(self, image: Image, plan: VisualPlan, question: str) -> int:
        """Half of all tokens for a question about a part, and at least `fewest_tokens`; else all."""
        return max(self.fewest_tokens, plan.tokens // 2) if asks_for_part(question) else plan.tokens


def tiling(plan: VisualPlan, side: int, full: int) -> Tiling:
    """The place of the picture in the grid of tiles.

    side: cells along a side of a tile.
    full: tokens of the plan without a reduction.
    """
    down, across = side * plan.grid[1], side * plan.grid[2]
    rows, columns = size_without_border(plan.height, plan.width, down, across)
    base = full - rows * (columns + 1)
    return Tiling(rows, columns, side, (down - rows) // 2, (across - columns) // 2, base)
