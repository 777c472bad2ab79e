"""The plain-torch twin of every kernel: slow, obvious, and the oracle that tests compare the fast ones with."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) in float32, rounded to x's type, then scaled: the order in which Llama checkpoints were trained."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention. x (T, H, D); cos, sin (T, 1, D) float32, as is what is computed."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, first: int) -> Tensor:
    """Causal attention of T queries that stand at positions first..first+T-1 over L = first + T keys.

    query (T, H, D), key and value (L, Hkv, D) with H a multiple of Hkv; returns (T, H, D).
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
    """`attention` with keys and values in blocks. kv (blocks, block_size, 2, Hkv, D), table: the sequence's blocks."""
    flat = kv[torch.tensor(table, device=kv.device)].flatten(0, 1)[: first + query.shape[0]]
    return attention(query, flat[:, 0], flat[:, 1], scale, first)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)
