"""Llama 3.2 Vision (mllama): text attends to the states of images, which lie outside of the prompt."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fovea.engine.layers.layer import CrossLayer
from fovea.engine.layers.linear import Linear
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.text import decoder_config
from fovea.engine.models.towers import mllama_tower
from fovea.engine.vision.calls import ProjectorLayer, apply_by_rows
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.mllama import MllamaTower
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.kernels.transfer import to_device
from fovea.planner.shape import Tower


class Mllama(VisionLanguageModel):
    """Llama 3.2 Vision.

    The output of its encoder is the keys and values of the image's states for all layers with
    cross-attention. They take more memory than the states, but every later token reads them. The rows of the
    tiles of padding are left out: no text may attend to them.
    """

    def __init__(self, config: Any) -> None:
        decoder = decoder_config(config.text_config, tied=False)
        super().__init__(config, decoder=decoder)
        self.vision = MllamaTower(mllama_tower(config.vision_config))
        self.projector = Linear(self.vision.config.width, decoder.hidden, bias=True)

    def state_slices(self, image: ProcessedImage) -> Slices[Tensor]:
        """Encode one image to its states (`VisualPlan.states`, hidden), one slice at a time."""
        pixels = self.array_tensor(image)
        grid_id = to_device(torch.from_numpy(image.arrays["aspect_ratio_ids"]), self.device)
        rows = yield from self.vision.slices(pixels, grid_id)
        return (yield from apply_by_rows(ProjectorLayer(self.projector), rows[: image.plan.states]))

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        states = yield from self.state_slices(image)
        parts: list[Tensor] = []
        for number in self.decoder.config.cross_layers:
            attention = cast(CrossLayer, self.decoder.layers[number]).cross_attn
            parts.append((yield from apply_by_rows(attention.keys_values, states)))
        return VisualFeatures(parts[0], tuple(parts[1:]))

    def visual(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mark no token as visual: an image's token has an embedding like every other."""
        return np.zeros(ids.shape, dtype=np.bool_)

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        return self.vision.shape(plan.grid[1] * plan.grid[2])

    def tower_shape(self) -> Tower:
        return self.vision.tower_shape()

    def projector_modules(self) -> list[nn.Module]:
        return [self.projector, *self._key_value_modules()]

    def encoder_modules(self) -> list[nn.Module]:
        return [*super().encoder_modules(), *self._key_value_modules()]

    def _key_value_modules(self) -> list[nn.Module]:
        """The modules of the decoder that compute keys and values of image states, once with the image."""
        layers = [cast(CrossLayer, self.decoder.layers[n]) for n in self.decoder.config.cross_layers]
        mixers = [layer.cross_attn for layer in layers]
        return [module for mixer in mixers for module in (mixer.k_proj, mixer.v_proj, mixer.k_norm)]

    @property
    def visual_token_bytes(self) -> int:
        config = self.decoder.config
        cross = config.cross_attention
        assert cross is not None
        return 2 * len(config.cross_layers) * cross.kv_heads * cross.head_dim * self.dtype.itemsize
