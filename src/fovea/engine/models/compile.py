"""torch.compile for what layers do before and after attention: norms, products, activations, residuals.

Attention itself is not compiled: it reads tables that change with every step, and its kernels are torch's
best already. Layers name the methods to compile in the attribute `rowwise`. All layers of a class share the
code that is compiled for the first of them. So a method is compiled once per class for any number of rows,
and once more for a single row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError
from fovea.engine.compile_modes import CompileModes
from fovea.engine.models.base import VisionLanguageModel
from fovea.kernels.base import Kernels
from fovea.kernels.choose import secure_torch_cache
from fovea.kernels.native.build import compiler

Rowwise = Callable[..., Tensor]


def check_compile(modes: CompileModes, kernels: Kernels, quantization: str) -> None:
    """Raise ConfigError if torch cannot compile the model's layers.

    The reasons are packed products, Fovea's own kernels, quantization, and a missing C++ compiler.
    """
    if not modes.active:
        return
    names = ", ".join(f"{name}={mode}" for name, mode in modes.active.items())
    if not kernels.plain:
        raise ConfigError(
            f"compile asks for {names}, but the model runs on kernels that torch cannot compile; "
            "--kernels torch uses only kernels that it can",
            param="compile",
        )
    if quantization != "none":
        raise ConfigError(
            f"compile asks for {names}, which cannot be combined with quantization", param="compile"
        )
    if not torch.cuda.is_available() and not compiler():
        raise ConfigError(f"compile asks for {names}, but this machine has no C++ compiler", param="compile")


def compile_modules(model: VisionLanguageModel, modes: CompileModes) -> None:
    """Replace the `rowwise` methods of the chosen components by compiled ones. All weights must be loaded.

    torch compiles a method when it is called for the first time.
    """
    if modes.active:
        secure_torch_cache()
    projector = {layer for module in model.projector_modules() for layer in module.modules()}
    encoder = [
        layer for module in model.encoder_modules() for layer in module.modules() if layer not in projector
    ]
    components: dict[str, Iterable[nn.Module]] = {
        "encoder": encoder,
        "projector": projector,
        "decoder": model.decoder.modules(),
    }
    for name, mode in modes.active.items():
        for layer in components[name]:
            for method in getattr(layer, "rowwise", ()):
                setattr(layer, method, _compile(getattr(layer, method), mode, model.device))


def _compile(method: Rowwise, mode: str, device: torch.device) -> Rowwise:
    # None is the mode "default": with a mode's name torch would refuse further options.
    fast: Rowwise = torch.compile(method, mode=None if mode == "default" else mode, dynamic=True)
    if device.type != "cuda" or mode == "default":
        return fast

    def apply(*rows: Any) -> Tensor:
        # These modes replay CUDA graphs. The next replay overwrites the output, so the caller gets a copy.
        return fast(*rows).clone()

    return apply
