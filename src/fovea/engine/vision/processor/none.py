"""The image processor of models without a vision tower, which refuses every image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from fovea.core.errors import InvalidRequest
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.base import Capabilities, VisualPlan


@dataclass(frozen=True, slots=True)
class NoImages:
    """Takes no image. Requests with images are refused before they come here (`core.types.check_media`)."""

    capabilities: Capabilities = Capabilities(droppable=False, images=False)

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> NoReturn:
        """Raise InvalidRequest."""
        raise InvalidRequest("this model takes no images; accepted: text", code="image_not_supported")

    def process(self, image: Image, plan: VisualPlan) -> NoReturn:
        """Raise InvalidRequest."""
        raise InvalidRequest("this model takes no images; accepted: text", code="image_not_supported")
