"""GLM-4.1V (arXiv 2507.01006) and GLM-4.6V-Flash: a tower for any resolution, GLM-4's decoder with M-RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fovea.engine.layers.config import Dense
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.targets import FusedTensor
from fovea.engine.models.text import text_renames
from fovea.engine.models.towers import glm4v_tower
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.glm4v import Glm4vTower
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.planner.shape import Tower


class Glm4v(VisionLanguageModel):
    """GLM-4.1V and GLM-4.6V-Flash. They take images and, in Fovea, no videos."""

    def __init__(self, config: Any) -> None:
        vision = glm4v_tower(config.vision_config)
        super().__init__(config, merge=vision.merge)
        self.expect_width(vision.out_hidden)
        self.renames = text_renames(config.text_config)
        self.vision = Glm4vTower(vision)

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        tokens, _ = yield from self.vision.slices(self.array_tensor(image), image.plan.grid)
        return VisualFeatures(tokens)

    def any_size_tower(self) -> Glm4vTower:
        return self.vision

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        return self.vision.shape(plan.grid)

    def tower_shape(self) -> Tower:
        return self.vision.tower_shape()

    def projector_modules(self) -> list[nn.Module]:
        return [self.vision.downsample, self.vision.merger]

    def fused_tensors(self) -> Mapping[str, FusedTensor]:
        """Gate and up of the decoder's MLPs, which checkpoints store as one tensor."""
        fused = {}
        for number, layer in enumerate(self.whole.layers):
            assert isinstance(layer.feed_forward, Dense)
            path, rows = f"decoder.layers.{number}.mlp.", layer.feed_forward.intermediate
            name = f"{path}gate_up_proj.weight"
            parts = ((f"{path}gate_proj.weight", rows), (f"{path}up_proj.weight", rows))
            fused[name] = FusedTensor(name, 1, parts)
        return fused
