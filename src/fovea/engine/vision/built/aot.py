"""The format "aot": C++ (CPU) or Triton (CUDA) code, compiled once by torch.export and AOTInductor.

The model's own weights are inputs of the compiled code. So a file is two megabytes of code, all segments of
one shape share it, and no weight is in memory twice.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError
from fovea.engine.vision.built.format import RunSegment
from fovea.kernels.choose import secure_torch_cache
from fovea.kernels.native.build import compiler


class _InputWeights(nn.Module):
    """A segment whose weights are inputs of `forward`, in the order of `weights`."""

    def __init__(self, segment: nn.Module) -> None:
        super().__init__()
        self.__dict__["segment"] = segment  # hidden from torch, which would export its weights

    def weights(self) -> dict[str, Tensor]:
        segment: nn.Module = self.__dict__["segment"]
        return dict(segment.named_parameters()) | dict(segment.named_buffers())

    def forward(self, x: Tensor, *weights: Tensor) -> Any:
        named = dict(zip(self.weights(), weights, strict=True))
        return torch.func.functional_call(self.__dict__["segment"], named, (x,))


class Aot:
    """The format "aot"; see `Format`."""

    suffix = ".pt2"
    packages = ("torch",)
    shares_weights = True

    def check(self, device: torch.device) -> None:
        if device.type == "cpu" and not compiler():
            raise ConfigError("aot needs a C++ compiler, and this machine has none", param="format")

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def build(self, segment: nn.Module, x: Tensor, path: Path) -> None:
        secure_torch_cache()
        bare = _InputWeights(segment)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FutureWarning)  # torch warns about its own code
            program = torch.export.export(bare, (x, *bare.weights().values()), strict=False)
            # The code counts threads when it runs: the server may have another number of threads than the
            # build.
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs={"cpp.dynamic_threads": True}
            )

    def load(self, path: Path, segment: nn.Module) -> RunSegment:
        # Detached tensors keep the plain weights alive when the layers drop them after packing.
        weights = [tensor.detach() for tensor in _InputWeights(segment).weights().values()]
        package: Any = torch._inductor.aoti_load_package(str(path))

        def run(x: Tensor) -> tuple[Tensor, ...]:
            outputs: tuple[Tensor, ...] = package(x.contiguous(), *weights)
            return outputs

        return run


FORMAT = Aot()
