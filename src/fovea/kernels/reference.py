"""The naive twins of the kernels in plain torch: slow and obvious. Tests compare fast kernels with them."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x (..., width) / rms(x), times weight (width,).

    The quotient is computed in float32 and rounded to x's type before it is multiplied by the weight. Llama
    checkpoints were trained with this order.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def centered_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x (..., width) / rms(x), times 1 + weight (width,).

    All of it is computed in float32 and rounded once. Gemma and Qwen3.5 were trained with this norm.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `rms_norm` of x (rows, width), times silu(gate); gate is (rows, width).

    The norm is rounded to x's type. The gate and the product are computed in float32.
    """
    normal = rms_norm(x, weight, eps).float()
    return (normal * torch.nn.functional.silu(gate.float())).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of x (T, H, D).

    The first R numbers of each head are rotated: number i forms a pair with number i + R / 2. The other
    numbers stay.

    cos, sin: (T, 1, R) float32, the type in which it is computed.
    """
    width = cos.shape[-1]
    turned, half = x[..., :width], width // 2
    swapped_halves = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    turned = (turned * cos + swapped_halves * sin).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, first: int) -> Tensor:
    """Return the causal attention of T queries at positions first..first+T-1 over L = first + T keys.

    query (T, H, D), key and value (L, Hkv, D) with H a multiple of Hkv. The result is (T, H, D).
    """
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("thd,lhd->htl", query.float(), key.float()) * scale
    length, span = query.shape[0], key.shape[0]
    allowed = torch.arange(span)[None, :] <= torch.arange(first, first + length)[:, None]
    scores = scores.masked_fill(~allowed.to(scores.device), float("-inf"))
    return torch.einsum("htl,lhd->thd", scores.softmax(-1), value.float()).to(query.dtype)


def paged_attention(query: Tensor, kv: Tensor, table: list[int], first: int, scale: float) -> Tensor:
    """Return `attention` over keys and values in blocks.

    kv: (blocks, block_size, 2, Hkv, D).
    table: block numbers of the sequence.
    """
    flat = kv[torch.tensor(table, device=kv.device)].flatten(0, 1)[: first + query.shape[0]]
    return attention(query, flat[:, 0], flat[:, 1], scale, first)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)
