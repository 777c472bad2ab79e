"""The number format of training: bfloat16 where the processor computes in it, float32 elsewhere."""

from __future__ import annotations

import torch

from fovea.kernels.native.instruction_sets import has_bf16_units


def fast(device: str) -> torch.dtype:
    """The format in which matrices are multiplied fastest. device: its type, "cpu" or "cuda".

    A CPU without instructions for bfloat16 takes almost three times as long with it as with float32.
    """
    return torch.bfloat16 if device != "cpu" or has_bf16_units() else torch.float32


def autocast(device: str) -> torch.autocast:
    """The context in which a model computes in the fastest format."""
    return torch.autocast(device, torch.bfloat16, enabled=fast(device) == torch.bfloat16)
