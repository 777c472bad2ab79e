"""An encoder that reads a picture into learned queries: the rows of a picture come first, then the queries.

The rows of a picture all see each other. A query sees them, the queries before it, and itself. Norms,
projections and rotary positions are those of a Qwen2 decoder (DeepSeek-OCR 2, arXiv 2601.20552).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.engine.layers.config import Rotary
from fovea.engine.layers.linear import FusedLinear, GatedMLP, Linear, RMSNorm
from fovea.engine.layers.mixers import RotaryAngles
from fovea.engine.vision.encoding import Slices, cuts, slice_rows
from fovea.kernels.base import Kernels
from fovea.kernels.torch_kernels import PLAIN


@dataclass(frozen=True, slots=True)
class QueryEncoderConfig:
    """Shape of the encoder. heads, kv_heads: query heads, and heads of keys and values."""

    hidden: int
    depth: int
    heads: int
    kv_heads: int
    intermediate: int
    activation: str
    eps: float
    rotary: Rotary

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class _Attention(nn.Module):
    kernels: Kernels = PLAIN

    def __init__(self, config: QueryEncoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        shared = config.kv_heads * config.head_dim
        outputs = {"q_proj": config.hidden, "k_proj": shared, "v_proj": shared}
        self.qkv = FusedLinear(config.hidden, outputs, bias=True)
        self.o_proj = Linear(config.hidden, config.hidden, bias=False)

    def forward(self, qkv: Tensor, own: int) -> Tensor:
        """Attention inside every picture, without the output projection.

        qkv: (pictures, rows, heads + 2 * kv_heads, head_dim), rotated.
        own: number of a picture's own rows; the others are queries.

        Returns (pictures, rows, hidden).
        """
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = torch.split(qkv.transpose(1, 2), sizes, dim=1)
        total = q.shape[2]
        mask = torch.ones(total - own, total, dtype=torch.bool, device=q.device).tril(own)
        attend = functional.scaled_dot_product_attention
        picture = attend(q[:, :, :own], k[:, :, :own], v[:, :, :own], enable_gqa=True)
        queries = attend(q[:, :, own:], k, v, attn_mask=mask, enable_gqa=True)
        return torch.cat((picture, queries), dim=2).transpose(1, 2).flatten(2)


class QueryBlock(nn.Module):
    """One block: attention and MLP, each after a norm. Its attribute names are those of the checkpoints."""

    rowwise = ("before", "after")

    def __init__(self, config: QueryEncoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = GatedMLP(config.hidden, config.intermediate, config.activation, bias=False)

    def slices(self, x: Tensor, own: int, cos: Tensor, sin: Tensor) -> Slices[Tensor]:
        """Compute the block on some pictures, x (pictures, rows, hidden).

        own: number of a picture's own rows.
        cos, sin: (pictures * rows, 1, head_dim) float32.
        """
        rows = x.flatten(0, 1)
        qkv = self.before(rows, cos, sin)
        yield None
        mixed = self.self_attn(qkv.view(*x.shape[:2], *qkv.shape[1:]), own)
        yield None
        rows = self.after(mixed.flatten(0, 1), rows)
        yield None
        return rows.view(x.shape)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values of rows x (T, hidden), queries and keys rotated."""
        attention = self.self_attn
        rotated = attention.heads + attention.kv_heads
        qkv: Tensor = attention.qkv(self.input_layernorm(x))
        qkv = qkv.view(len(x), rotated + attention.kv_heads, -1)
        return attention.kernels.rotate(qkv, rotated, cos, sin)

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Apply output projection, norm and MLP to attention output `mixed` of rows x, both (T, hidden)."""
        x = self.self_attn.o_proj(mixed, x)
        return self.mlp(self.post_attention_layernorm(x), x)  # type: ignore[no-any-return]


class QueryEncoder(nn.Module):
    """The encoder. Its attribute names are those of the checkpoints."""

    def __init__(self, config: QueryEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(QueryBlock(config) for _ in range(config.depth))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.rotary = RotaryAngles(config.rotary)

    def slices(self, x: Tensor, queries: Tensor) -> Slices[Tensor]:
        """Read pictures into queries, one part of a block of some pictures at a time.

        x: (pictures, own rows, hidden).
        queries: (queries, hidden), equal for all pictures.

        Returns (pictures, queries, hidden).
        """
        own = x.shape[1]
        x = torch.cat((x, queries.expand(len(x), -1, -1)), dim=1)
        at_once = max(1, slice_rows(x) // x.shape[1])
        positions = torch.arange(x.shape[1], device=x.device).repeat(min(at_once, len(x)))
        cos, sin = self.rotary(positions, x.dtype)
        for block in self.layers:
            outputs = []
            for some in cuts(len(x), at_once):
                part = x[some]
                rows = part.shape[0] * part.shape[1]
                slices = cast("QueryBlock", block).slices(part, own, cos[:rows], sin[:rows])
                outputs.append((yield from slices))
            x = torch.cat(outputs)
        return self.norm(x[:, own:])  # type: ignore[no-any-return]

    def pairs(self, own: int, queries: int) -> int:
        """Pairs of rows that attend to each other in one picture, in all blocks."""
        return self.config.depth * (own**2 + queries * own + queries * (queries + 1) // 2)
