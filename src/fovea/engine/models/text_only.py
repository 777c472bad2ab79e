"""Models without a vision tower: Llama, Mistral, Qwen2, Qwen3 and Gemma 3 for text alone.

They run on the same decoder as all others. Nothing else knows that they exist: their tower has no modules, no
token of a prompt is visual, and their image processor (`vision.processor.none`) refuses every image.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fovea.core.errors import EngineError
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.text import decoder_config
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan


class TextModel(VisionLanguageModel):
    """A decoder alone."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, decoder=decoder_config(config, tied=bool(config.tie_word_embeddings)))

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        raise EngineError("a text model was given an image to encode, although its processor plans none")

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        raise EngineError(
            "a text model was asked for the rows of an image, although its processor plans none"
        )

    def tower_shape(self) -> None:
        """Return None: there is no tower."""

    def projector_modules(self) -> list[nn.Module]:
        """Return no modules: there is no projector."""
        return []

    @property
    def visual_token_bytes(self) -> int:
        """0: there are no visual tokens."""
        return 0
