"""Prepares images for encoding region by region, for towers that take pictures of any size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from PIL.Image import Resampling

from fovea.core.media import Image
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan, expect_planned
from fovea.engine.vision.processor.pixels import picture, resize
from fovea.engine.vision.processor.surveys import survey_arrays
from fovea.relevance.attending import entropy_total
from fovea.relevance.pipeline import Survey, survey
from fovea.relevance.policy import content_mask

if TYPE_CHECKING:
    from fovea.engine.vision.processor.base import AnySizeProcessor


@dataclass(frozen=True, slots=True)
class AnySizeRegions:
    """A `base.RegionProcessor` that keeps the pixels as bytes, from which any region can be cut out."""

    processor: AnySizeProcessor
    fewest_tokens: int = 1

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        expect_planned(image, plan)
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

    def own_tokens(self, image: Image, plan: VisualPlan) -> int:
        """Number of tokens by the entropy of a coarse survey (`attending.entropy_total`)."""
        coarse = survey_coarsely(self.processor, image, plan)
        relevance = np.maximum(coarse.propositional, coarse.perspectival)
        content = content_mask(coarse.propositional, coarse.perspectival)
        return entropy_total(relevance[content])


def survey_coarsely(processor: AnySizeProcessor, image: Image, plan: VisualPlan) -> Survey:
    """Survey the image at half the height and width of its plan. CPU-bound, some milliseconds."""
    ((height, width),) = plan.sizes
    pixels = resize(picture(image), height // 2, width // 2, Resampling.BOX)
    return survey(np.ascontiguousarray(pixels), processor.factor // 2)
