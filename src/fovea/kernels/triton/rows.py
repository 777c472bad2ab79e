"""Operations on rows on a GPU: norms, rotary embedding with the write to the KV pool, gated activations.

Each is one launch. Numbers are rounded where the twins in `reference` round them. In tests these kernels run
on a CPU, in Triton's interpreter. TRITON_INTERPRET=1 has to be set before the first import for that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fovea.kernels.activation import finish as plain_finish

GATE_TILE = 1024
"""Numbers of a row that one program of the gated activation computes."""


def next_power(count: int) -> int:
    """Return the least power of two that is at least `count`. Sides of Triton's tiles are powers of two."""
    return 1 << (count - 1).bit_length()


@triton.jit
def _rms_norm(x, delta, weight, total, out, width, eps, WIDTH: tl.constexpr, ADDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, WIDTH)
    inside = at < width
    wide = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        added = wide + tl.load(delta + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = added.to(x.dtype.element_ty)
        tl.store(total + row + at, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normal = (wide * inverse).to(x.dtype.element_ty).to(tl.float32)
    scaled = normal * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x (..., width). Its twin is `reference.rms_norm`."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    size = next_power(width)
    _rms_norm[(x.numel() // width,)](x, x, weight, x, out, width, eps, WIDTH=size, ADDS=False)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + delta and its norm. x and delta are contiguous, (rows, width)."""
    total, out, width = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    size = next_power(width)
    _rms_norm[(x.shape[0],)](x, delta, weight, total, out, width, eps, WIDTH=size, ADDS=True)
    return total, out


@triton.jit
def _silu_mul(x, out, width, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < width
    gate = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (active * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(x: Tensor) -> Tensor:
    """Return silu of the first half of the rows of x (..., 2 * width), times the second half."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], width))
    grid = (x.numel() // (2 * width), triton.cdiv(width, GATE_TILE))
    _silu_mul[grid](x, out, width, SIZE=GATE_TILE)
    return out


def finish(y: Tensor, activation: str | None, gated: bool, residual: Tensor | None) -> Tensor:
    """Do the work of `activation.finish`. A gated SiLU is one launch."""
    if gated and activation == "silu":
        y = silu_mul(y)
        return y if residual is None else residual + y
    return plain_finish(y, activation, gated, residual)


@triton.jit
def _rotate_store(
    qkv, cos, sin, query_weight, key_weight, query, kv, slots, heads, kv_heads, dim, eps,
    DIM: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Compute one head of one row. Rotation needs numbers i and i + dim / 2 together, so it reads twice."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, DIM)
    inside = at < dim
    half = dim // 2
    partner = (at + half) % dim
    source = qkv + (row * (heads + 2 * kv_heads) + head) * dim
    own = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if head < heads + kv_heads:
        other = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            weight = query_weight
            if head >= heads:
                weight = key_weight
            inverse = tl.rsqrt(tl.sum(own * own, axis=0) / dim + eps)
            own = (own * inverse).to(qkv.dtype.element_ty).to(tl.float32)
            other = (other * inverse).to(qkv.dtype.element_ty).to(tl.float32)
            own *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
            other *= tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32)
            own = own.to(qkv.dtype.element_ty).to(tl.float32)
            other = other.to(qkv.dtype.element_ty).to(tl.float32)
        turned = tl.where(at < half, -other, other)
        angle = row * dim + at
        own = own * tl.load(cos + angle, mask=inside, other=0.0) + turned * tl.load(
            sin + angle, mask=inside, other=0.0
        )
    if head < heads:
        tl.store(query + (row * heads + head) * dim + at, own.to(query.dtype.element_ty), mask=inside)
    else:
        # Keys before values: they have this order both in the row and in a slot.
        target = (tl.load(slots + row) * 2 * kv_heads + head - heads) * dim
        tl.store(kv + target + at, own.to(kv.dtype.element_ty), mask=inside)


def rotate_store(
    qkv: Tensor, heads: int, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float,
    kv: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """Do the work of `kernels.base.Kernels.rotate_store`. kv is contiguous; qkv is not changed."""
    qkv = qkv.contiguous()
    rows, _, dim = qkv.shape
    kv_heads = kv.shape[3]
    query = qkv.new_empty((rows, heads, dim))
    query_weight, key_weight = (qkv, qkv) if norms is None else norms
    _rotate_store[(rows, heads + 2 * kv_heads)](
        qkv, cos, sin, query_weight, key_weight, query, kv, slots, heads, kv_heads, dim, eps,
        DIM=next_power(dim), NORMS=norms is not None,
    )  # fmt: skip
    return query
