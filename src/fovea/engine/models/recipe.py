"""Quantization recipes: which weights are quantized, and to which format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from fovea.engine.layers.linear import Linear, PatchLinear
from fovea.engine.models.base import VisionLanguageModel
from fovea.kernels.base import Kernels
from fovea.kernels.quantize import FP8, INT4, INT8, Format


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats of the linear maps of a model; None: not quantized.

    Norms and biases are never quantized. Patch embeddings are not either: they read pixels, and their cost is
    small. An embedding table that is also the language head is stored once, in the head's format.

    decoder: format of the decoder's layers.
    encoder: format of the vision tower and the projector.
    head: format of the language head.
    """

    decoder: Format | None = None
    encoder: Format | None = None
    head: Format | None = None

    def format_of(self, path: str, layer: Linear) -> Format | None:
        """Return the format of a layer.

        path: its attribute path in the model, such as "decoder.layers.0.mlp.down_proj".
        """
        if isinstance(layer, PatchLinear):
            return None
        if path.startswith("decoder."):
            return self.decoder
        return self.head if path.startswith("head.") else self.encoder


RECIPES = {
    "none": Recipe(),
    "int8": Recipe(INT8, INT8, INT8),
    # The encoder computes many rows at a time and the head runs once per token, so 8 bits cost little time
    # there.
    "int4": Recipe(INT4, INT8, INT8),
    # The head's outputs are compared with each other; rounded activations would disturb this most.
    "fp8": Recipe(FP8, FP8, None),
}
"""Recipes by the values of the setting `quantization`."""


class Packer:
    """Packs every layer as soon as its weights are loaded, so that the plain weights are never all in memory.

    model: its layers are packed for `kernels`, in the formats of `recipe`.
    later: modules whose layers are not packed before `pack_rest`.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        kernels: Kernels,
        recipe: Recipe,
        later: Iterable[nn.Module] = (),
    ) -> None:
        self._kernels = kernels
        waiting = {layer for module in later for layer in module.modules()}
        self._formats: dict[Linear, Format | None] = {}
        self._layers: dict[str, Linear] = {}
        self._missing: dict[Linear, int] = {}
        for path, layer in model.named_modules():
            if not isinstance(layer, Linear) or layer is model.head.lm_head and model.head.tied:
                continue
            self._formats[layer] = recipe.format_of(path, layer)
            if layer not in waiting:
                names = model.checkpoint_names(path, layer)
                self._layers |= dict.fromkeys(names, layer)
                self._missing[layer] = len(names)

    def mark_filled(self, name: str) -> None:
        """Note that the tensor of that canonical name is loaded. Packs a layer after its last tensor."""
        layer = self._layers.get(name)
        if layer is None:
            return
        self._missing[layer] -= 1
        if not self._missing[layer]:
            self._pack(layer)

    def pack_rest(self) -> None:
        """Pack all layers that are not packed yet. All weights must be loaded."""
        for layer in self._formats:
            self._pack(layer)

    def _pack(self, layer: Linear) -> None:
        layer.pack(self._kernels, self._formats[layer])
