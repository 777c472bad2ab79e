"""Which weights are quantized, and to what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from fovea.engine.layers.linear import Linear, PatchLinear
from fovea.engine.models.base import VisionLanguageModel
from fovea.kernels.fp8 import FP8
from fovea.kernels.quantize import INT4, INT8, Format
from fovea.kernels.torch.kernels import TorchKernels


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats of the linear maps of decoder, vision tower (projector included) and language head; None: as stored.

    Norms and biases stay as they are, and so do patch embeddings: pixels go in there, and they cost next to nothing. An
    embedding table that is the language head as well is kept once, in the head's format.
    """

    decoder: Format | None = None
    encoder: Format | None = None
    head: Format | None = None

    def of(self, path: str, layer: Linear) -> Format | None:
        """path: where the layer is in the model, from its first attribute on."""
        if isinstance(layer, PatchLinear):
            return None
        if path.startswith("decoder."):
            return self.decoder
        return self.head if path.startswith("head.") else self.encoder


RECIPES = {
    "none": Recipe(),
    "int8": Recipe(INT8, INT8, INT8),
    # The encoder and the head are computed for many rows or once per token: 8 bits cost little time there.
    "int4": Recipe(INT4, INT8, INT8),
    # Rows of the head are compared with each other, which rounding of activations disturbs most.
    "fp8": Recipe(FP8, FP8, None),
}
"""By the names of `EngineConfig.quantization`."""


class Packer:
    """Packs every layer as soon as a checkpoint has filled it, so that the plain weights are never all in memory.

    later: modules whose layers wait for `rest`.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        kernels: TorchKernels,
        recipe: Recipe,
        later: Iterable[nn.Module] = (),
    ) -> None:
        self._kernels = kernels
        waiting = {layer for part in later for layer in part.modules()}
        self._formats: dict[Linear, Format | None] = {}
        self._layers: dict[str, Linear] = {}
        self._missing: dict[Linear, int] = {}
        for path, layer in model.named_modules():
            if not isinstance(layer, Linear) or layer is model.head.lm_head and model.head.tied:
                continue
            self._formats[layer] = recipe.of(path, layer)
            if layer not in waiting:
                names = model.checkpoint_names(path, layer)
                self._layers |= dict.fromkeys(names, layer)
                self._missing[layer] = len(names)

    def filled(self, name: str) -> None:
        """The tensor of that name is in."""
        layer = self._layers.get(name)
        if layer is None:
            return
        self._missing[layer] -= 1
        if not self._missing[layer]:
            self._pack(layer)

    def rest(self) -> None:
        for layer in self._formats:
            self._pack(layer)

    def _pack(self, layer: Linear) -> None:
        layer.pack(self._kernels, self._formats[layer])
