"""torch.export and AOTInductor: C++ (CPU) or Triton (CUDA) code, compiled once, that reads the model's own weights.

Weights are inputs: a file is two megabytes of code, the same for all parts of a shape, and no weight is in memory twice.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError
from fovea.engine.vision.built.format import RunPart
from fovea.kernels.native.build import compiler


class _Bare(nn.Module):
    """A part whose weights come as inputs, in the order of `weights`."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.__dict__["part"] = part  # unknown to torch, which would export its weights

    def weights(self) -> dict[str, Tensor]:
        part: nn.Module = self.__dict__["part"]
        return dict(part.named_parameters()) | dict(part.named_buffers())

    def forward(self, x: Tensor, *weights: Tensor) -> Any:
        named = dict(zip(self.weights(), weights, strict=True))
        return torch.func.functional_call(self.__dict__["part"], named, (x,))


class Aot:
    suffix = ".pt2"
    packages = ("torch",)
    shares_weights = True

    def check(self, device: torch.device) -> None:
        if device.type == "cpu" and not compiler():
            raise ConfigError("aot needs a C++ compiler, and there is none here", param="format")

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def build(self, part: nn.Module, x: Tensor, path: Path) -> None:
        bare = _Bare(part)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about torch
            program = torch.export.export(bare, (x, *bare.weights().values()), strict=False)
            # Threads are counted when it runs: whoever serves may have another number of them.
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs={"cpp.dynamic_threads": True}
            )

    def load(self, path: Path, part: nn.Module) -> RunPart:
        # Of their own: packing takes a layer its plain weight, not the storage that stands here.
        weights = [tensor.detach() for tensor in _Bare(part).weights().values()]
        package: Any = torch._inductor.aoti_load_package(str(path))

        def run(x: Tensor) -> tuple[Tensor, ...]:
            made: tuple[Tensor, ...] = package(x.contiguous(), *weights)
            return made

        return run


FORMAT = Aot()
