"""Weights in the layout that the machine multiplies fastest.

On CPU, oneDNN keeps a weight in blocks that match its registers. Reordering once at load instead of in every call
turns a memory-bound product from two thirds of the memory's bandwidth into nearly all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def can_pack(weight: Tensor) -> bool:
    """Whether this build and machine have a packed product for the weight's type and shape."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and weight.shape[1] > 1
    return weight.dtype is torch.float32 and weight.shape[1] > 1


def pack(weight: Tensor) -> Tensor:
    """(out, in) weight to oneDNN's own layout; opaque from here on, to be used by `packed_linear` alone."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., in) times a packed weight, plus bias; returns (..., out)."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y
