"""Images seen region by region, for processors that prepare pictures of any size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from PIL.Image import Resampling

from fovea.core.image import Image
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan, expect_planned
from fovea.engine.vision.processor.pixels import resized_bytes
from fovea.engine.vision.processor.surveys import survey_arrays
from fovea.relevance.attending import entropy_total
from fovea.relevance.balancing import Ways
from fovea.relevance.pipeline import Survey, survey
from fovea.relevance.policy import content_mask

if TYPE_CHECKING:
    from fovea.engine.vision.processor.base import AnySizeProcessor


@dataclass(frozen=True, slots=True)
class AnySizeRegions:
    """Implements `base.RegionProcessor`. Pixels stay bytes, from which any region can be cut."""

    processor: AnySizeProcessor
    fewest_tokens: int = 1

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        expect_planned(image, plan)
        ((height, width),) = plan.resized
        pixels = np.ascontiguousarray(resized_bytes(image, height, width, self.processor.resample))
        arrays = {"rgb": pixels, **survey_arrays(pixels, self.processor.factor)}
        return ProcessedImage(image.identity, plan, arrays)

    def whole(self, image: ProcessedImage) -> ProcessedImage:
        reduction = image.plan.reduction
        assert reduction is not None
        plan = replace(image.plan, tokens=reduction.full, reduction=None)
        if "rgb" not in image.arrays:
            return replace(image, plan=plan)
        patches = self.processor.patches(image.arrays["rgb"])
        return replace(image, plan=plan, arrays={"pixel_values": patches})

    def own_tokens(self, image: Image, plan: VisualPlan) -> int:
        """`attending.entropy_total` of a survey at half the sides."""
        result = glimpse(self.processor, image, plan)
        worth = np.maximum(result.propositional, result.perspectival)
        content = content_mask(Ways(result.propositional, result.perspectival, worth))
        return entropy_total(worth[content])


def glimpse(processor: AnySizeProcessor, image: Image, plan: VisualPlan) -> Survey:
    """A survey of the image at half the sides of its plan. CPU-bound, some milliseconds."""
    ((height, width),) = plan.resized
    pixels = resized_bytes(image, height // 2, width // 2, Resampling.BOX)
    return survey(np.ascontiguousarray(pixels), processor.factor // 2)
