"""Which set of kernels a model runs on."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec

import torch

from fovea.core.errors import ConfigError
from fovea.core.hardware import NATIVE_KERNELS_VARIABLE
from fovea.kernels.attention import ChunkAttention, Heads, prefill_each
from fovea.kernels.base import Kernels
from fovea.kernels.flash import attention as flash
from fovea.kernels.native.build import library
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.torch.kernels import TorchKernels

log = logging.getLogger("fovea.kernels")


def choose(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> Kernels:
    """name: "auto" is the best that device, type and machine allow; "native", "onednn", "torch", "triton" and "flashinfer"
    ask for one. heads: the decoder's.

    Raises ConfigError when "native", "triton" or "flashinfer" is asked for and cannot be had.
    """
    if name == "native" and device.type != "cpu":
        raise ConfigError(f"native kernels are for CPUs, the device is {device}", param="kernels")
    if name in ("triton", "flashinfer") or (name == "auto" and device.type == "cuda"):
        return _triton(name, device, dtype, heads)
    if name == "torch" or device.type != "cpu":
        return TorchKernels()
    if name != "onednn" and dtype is torch.bfloat16:
        found = library()
        if found is not None:
            return NativeKernels(found)
    if name == "native":
        raise ConfigError(
            f"native kernels need bfloat16 (the model runs in {str(dtype).removeprefix('torch.')}), AVX-512 with BF16, "
            f"a C++ compiler, and {NATIVE_KERNELS_VARIABLE} not off; the log tells if compiling failed",
            param="kernels",
        )
    return TorchKernels(pack=True)


def _triton(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> Kernels:
    """CUDA builds of torch bring Triton along; where it cannot be had, torch does the work unless Triton was asked for."""
    missing = _no_triton(device)
    if missing and name != "auto":
        raise ConfigError(missing, param="kernels")
    if missing:
        log.warning("%s; torch does without, and reads gathered copies of the KV cache", missing)
        return TorchKernels()
    from fovea.kernels.triton.kernels import TritonKernels

    return TritonKernels(device, _chunks(name, device, dtype, heads))


def _chunks(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> ChunkAttention:
    """FlashInfer's attention beside Triton's kernels, unless these were asked for alone; else torch's."""
    if name == "triton":
        return prefill_each
    try:
        found = flash.load(heads, device, dtype)
    except ConfigError as error:
        if name == "flashinfer":
            raise
        log.info("attention of prompts: torch's, over gathered copies of the KV cache; %s", error.message)
        return prefill_each
    log.info("attention of prompts: FlashInfer's, over the KV cache in place")
    return found


def _no_triton(device: torch.device) -> str:
    """Why its kernels cannot run; empty: they can."""
    if find_spec("triton") is None:
        return "triton kernels need the package triton, which is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"triton kernels are for CUDA, the device is {device}"
    if device.index:
        # Triton launches on the calling thread's current card, which is the first in every new thread.
        return f"triton kernels run on the first visible card, the device is {device}; choose it by CUDA_VISIBLE_DEVICES"
    return ""
