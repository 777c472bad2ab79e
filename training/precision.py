"""The number format of training: bfloat16 where the processor computes in it, float32 elsewhere."""

from __future__ import annotations

import torch


def fast(device: str) -> torch.dtype:
    """The format in which matrices are multiplied fastest. device: its type, "cpu" or "cuda".

    A CPU without instructions for bfloat16 takes almost three times as long with it as with float32.
    """
    supported = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if device != "cpu" or supported else torch.float32


def autocast(device: str) -> torch.autocast:
    """The context in which a model computes in the fastest format."""
    return torch.autocast(device, torch.bfloat16, enabled=fast(device) == torch.bfloat16)
