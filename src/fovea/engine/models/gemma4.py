"""Gemma 4: averages of squares of patches, and a decoder with windows and per-layer embeddings.

The audio tower that some checkpoints have is not loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.text import decoder_config, text_renames, unused_tensors
from fovea.engine.models.towers import gemma4_tower
from fovea.engine.vision.calls import ProjectorLayer, apply_by_rows
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.gemma4 import Gemma4Projector, Gemma4Tower
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.processor.gemma4 import BUDGETS
from fovea.planner.shape import Tower

AUDIO = (r"^(model\.)?(audio_tower|embed_audio)\.",)
"""Regular expressions of canonical names of the tensors for audio."""


class Gemma4(VisionLanguageModel):
    """Gemma 4. It takes no audio and no videos."""

    def __init__(self, config: Any) -> None:
        text, vision = config.text_config, config.vision_config
        if vision is None or vision.model_type != "gemma4_vision":
            kind = None if vision is None else vision.model_type
            raise UnsupportedModel(f"vision tower {kind!r} in gemma4; supported: gemma4_vision")
        decoder = decoder_config(text, tied=bool(config.tie_word_embeddings))
        if text.use_bidirectional_attention == "vision":
            decoder = replace(decoder, whole_images=BUDGETS[-1])
        super().__init__(config, decoder=decoder)
        self.vision = Gemma4Tower(gemma4_tower(vision))
        self.projector = Gemma4Projector(vision.hidden_size, text.hidden_size, vision.rms_norm_eps)
        self.renames = text_renames(text)
        self.ignored = (*AUDIO, *unused_tensors(text))

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        _, rows, columns = image.plan.grid
        x = yield from self.vision.slices(self.array_tensor(image, rounded=False), (rows, columns))
        return VisualFeatures((yield from apply_by_rows(ProjectorLayer(self.projector), x)))

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        _, rows, columns = plan.grid
        return self.vision.shape((rows, columns))

    def tower_shape(self) -> Tower:
        return self.vision.tower_shape()
