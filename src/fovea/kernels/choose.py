"""Which set of kernels a model runs on."""

from __future__ import annotations

import torch

from fovea.core.errors import ConfigError
from fovea.kernels.build import library
from fovea.kernels.native import NativeKernels
from fovea.kernels.torch_kernels import TorchKernels


def choose(name: str, device: torch.device, dtype: torch.dtype) -> TorchKernels:
    """name: "auto" is the best that device, type and machine allow; "native", "onednn", "torch" ask for one.

    Raises ConfigError when "native" is asked for and can not be had.
    """
    if name == "torch" or device.type != "cpu":
        if name == "native":
            raise ConfigError(f"native kernels are for CPUs, the device is {device}", param="kernels")
        return TorchKernels()
    if name != "onednn" and dtype is torch.bfloat16:
        found = library()
        if found is not None:
            return NativeKernels(found)
    if name == "native":
        raise ConfigError(
            f"native kernels need bfloat16 (the model runs in {str(dtype).removeprefix('torch.')}), AVX-512 with BF16 "
            "and a C++ compiler; the log says which is missing",
            param="kernels",
        )
    return TorchKernels(pack=True)
