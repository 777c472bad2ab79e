"""torch.compile on what a layer does to rows before and after attention: norms, products, activations, residuals.

Attention stays as it is: it reads tables that change with every step, and its kernels are torch's best already. Layers name
these methods in `rowwise`; layers of one class share what is compiled for the first of them, so it is compiled once per
class, for any number of rows (and once more for a single row).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError
from fovea.engine.compile_modes import CompileModes
from fovea.engine.models.base import VisionLanguageModel
from fovea.kernels.native.build import compiler
from fovea.kernels.torch.kernels import TorchKernels

Rowwise = Callable[..., Tensor]


def check_compile(modes: CompileModes, kernels: TorchKernels, quantization: str) -> None:
    """Raises ConfigError where torch can not see what it would compile: packed products, and kernels of our own."""
    if not modes.chosen:
        return
    asked = ", ".join(f"{name}={mode}" for name, mode in modes.chosen.items())
    if not kernels.plain:
        raise ConfigError(
            f"compile asks for {asked}, but the model runs on kernels that torch can not look into; --kernels torch "
            "can be compiled, and does without them",
            param="compile",
        )
    if quantization != "none":
        raise ConfigError(f"compile asks for {asked}, which does not go with quantization", param="compile")
    if not torch.cuda.is_available() and not compiler():
        raise ConfigError(f"compile asks for {asked}, but there is no C++ compiler here", param="compile")


def compile_parts(model: VisionLanguageModel, modes: CompileModes) -> None:
    """Weights are in: replace the methods by compiled ones, which torch makes when they are first called."""
    projector = {layer for part in model.projector_parts() for layer in part.modules()}
    encoder = [layer for part in model.encoder_parts() for layer in part.modules() if layer not in projector]
    parts: dict[str, Iterable[nn.Module]] = {
        "encoder": encoder,
        "projector": projector,
        "decoder": model.decoder.modules(),
    }
    for name, mode in modes.chosen.items():
        for layer in parts[name]:
            for method in getattr(layer, "rowwise", ()):
                setattr(layer, method, _compiled(getattr(layer, method), mode, model.device))


def _compiled(method: Rowwise, mode: str, device: torch.device) -> Rowwise:
    # "default" is spelt None: with a name torch would refuse options beside it.
    fast: Rowwise = torch.compile(method, mode=None if mode == "default" else mode, dynamic=True)
    if device.type != "cuda" or mode == "default":
        return fast

    def apply(*rows: Any) -> Tensor:
        # These modes replay CUDA graphs, whose outputs the next replay overwrites.
        return fast(*rows).clone()

    return apply
