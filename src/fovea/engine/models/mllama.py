"""The vision part of Llama 3.2 Vision (mllama): image states for the decoder's cross-attention layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fovea.engine.layers.linear import Linear
from fovea.engine.models.towers import mllama_tower
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.mllama import MllamaTower
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.shape import VisualShape
from fovea.engine.vision.slices import Slices, apply_by_rows, as_projector


class MllamaVision(nn.Module):
    """The tower and the projector. Their attribute names are canonical checkpoint names.

    The rows of the tiles of padding are not projected: no text may attend to them.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision = MllamaTower(mllama_tower(config.vision_config))
        self.projector = Linear(self.vision.config.width, config.text_config.hidden_size, bias=True)

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        """Encode one image to its states (`VisualPlan.states`, decoder width), one slice at a time."""
        table = self.vision.class_embedding
        pixels = torch.from_numpy(image.arrays["pixel_values"]).to(table.device, table.dtype)
        grid_id = torch.from_numpy(image.arrays["aspect_ratio_ids"]).to(table.device)
        rows = yield from self.vision.slices(pixels, grid_id)
        states = yield from apply_by_rows(as_projector(self.projector), rows[: image.plan.states])
        return VisualFeatures(states)

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        """Count the rows that the encoder computes for an image of that plan."""
        return self.vision.shape(plan.grid[1] * plan.grid[2])

    def projector_modules(self) -> list[nn.Module]:
        return [self.projector]
