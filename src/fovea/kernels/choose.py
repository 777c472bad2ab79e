"""Chooses the set of kernels that a model runs on."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec

import torch

from fovea.core.errors import ConfigError
from fovea.kernels.attention import ChunkAttention, Heads, prefill_each
from fovea.kernels.base import Kernels
from fovea.kernels.compile_caches import secure_gpu_caches
from fovea.kernels.flash import attention as flash
from fovea.kernels.native.build import build_failure, library
from fovea.kernels.native.instruction_sets import VARIABLE, chosen
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.torch.kernels import TorchKernels

log = logging.getLogger("fovea.kernels")


def choose(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> Kernels:
    """Return the kernels for a device and a type.

    name: "auto": the best kernels that device, type and machine allow; otherwise one of "native", "onednn",
        "torch", "triton", "flashinfer".
    heads: heads of the decoder.

    Raises ConfigError if the name is "native", "triton" or "flashinfer" and these kernels cannot run here.
    """
    if name == "native" and device.type != "cpu":
        raise ConfigError(f"native kernels are for CPUs, the device is {device}", param="kernels")
    if name in ("triton", "flashinfer") or (name == "auto" and device.type == "cuda"):
        return _triton(name, device, dtype, heads)
    if name == "torch" or device.type != "cpu":
        return TorchKernels()
    if name != "onednn" and dtype is torch.bfloat16:
        cpp = library()
        if cpp is not None:
            return NativeKernels(cpp)
    if name == "native":
        raise ConfigError(f"the native kernels cannot run: {_native_obstacle(dtype)}", param="kernels")
    return TorchKernels(pack=True)


def _native_obstacle(dtype: torch.dtype) -> str:
    """Return what the native kernels lack here, and what to do about it."""
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"they compute in bfloat16, and the model runs in {name}; start with --dtype bfloat16"
    if chosen() is None:
        if os.environ.get(VARIABLE) == "off":
            return f"{VARIABLE} is off; remove it, or set it to on"
        return "this CPU has none of their instruction sets (AVX2, AVX-512 or NEON); use --kernels torch"
    return f"they could not be compiled: {build_failure()}"


def results_depend_on(kernels: Kernels) -> str:
    """Return what decides about the last bits of results: the set of kernels, and its instruction set."""
    instructions = chosen() if isinstance(kernels, NativeKernels) else None
    return f"{type(kernels).__name__} {instructions.name}" if instructions else type(kernels).__name__


def _triton(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> Kernels:
    """Return Triton's kernels. If they cannot run, "auto" returns torch's, any other name raises ConfigError.

    CUDA builds of torch bring Triton along.
    """
    obstacle = _triton_obstacle(device)
    if obstacle and name != "auto":
        raise ConfigError(obstacle, param="kernels")
    if obstacle:
        log.warning(
            "%s; torch's kernels are used instead, which read gathered copies of the KV cache", obstacle
        )
        return TorchKernels()
    secure_gpu_caches()
    from fovea.kernels.triton.kernels import TritonKernels

    return TritonKernels(device, _chunks(name, device, dtype, heads))


def _chunks(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> ChunkAttention:
    """Return FlashInfer's attention of prompts if it works here, otherwise torch's.

    The name "triton" always gets torch's. "flashinfer" raises ConfigError if FlashInfer does not work.
    """
    if name == "triton":
        return prefill_each
    try:
        attention = flash.load(heads, device, dtype)
    except ConfigError as error:
        if name == "flashinfer":
            raise
        log.info("attention of prompts: torch's, over gathered copies of the KV cache; %s", error.message)
        return prefill_each
    log.info("attention of prompts: FlashInfer's, over the KV cache in place")
    return attention


def _triton_obstacle(device: torch.device) -> str:
    """Return the reason why Triton's kernels cannot run; an empty string if they can."""
    if find_spec("triton") is None:
        return "triton kernels need the package triton, which is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"triton kernels are for CUDA, the device is {device}"
    if device.index:
        # Triton launches on the current GPU of the calling thread. In every new thread that is the first one.
        return (
            f"triton kernels run on the first visible GPU only, the device is {device}; "
            "choose the GPU with CUDA_VISIBLE_DEVICES"
        )
    return ""
