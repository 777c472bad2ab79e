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
from fovea.kernels.pages import INT8, KV, SCALE, QuantizedKV

ALIGNED, LINE = 8, 64
"""Numbers of 16 and of 128 bytes in bfloat16."""
GATE_TILE = 1024
"""Numbers of a row that one program of the gated activation computes."""


def next_power(count: int) -> int:
    """Return the least power of two that is at least `count`. Sides of Triton's tiles are powers of two."""
    return 1 << (count - 1).bit_length()


@triton.jit
def _normal(wide, weight, at, inside, width, eps, rounded, CENTERED: tl.constexpr):
    """Return the norm of a row in float32, rounded to the type of the numbers that `rounded` points to."""
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        normal = wide * inverse * (1.0 + factor)
    else:
        normal = (wide * inverse).to(rounded.dtype.element_ty).to(tl.float32) * factor
    return normal.to(rounded.dtype.element_ty).to(tl.float32)


@triton.jit
def _tanh(x):
    """Return the hyperbolic tangent. Near 0 it is a series, because the quotient would lose digits."""
    squared = x * x
    series = x * (1.0 - squared * (0.3333333333 - squared * (0.1333333333 - squared * 0.0539682540)))
    return tl.where(tl.abs(x) < 0.1, series, 2.0 * sigmoid(2.0 * x) - 1.0)


@triton.jit
def _add_norm(
    x, y, inner, outer, factor, gate, total, out, width, eps,
    WIDTH: tl.constexpr, ADDS: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
    SCALES: tl.constexpr, GATES: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Compute one row: x, plus y or the norm of y, times a factor, and the norm of that."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, WIDTH)
    inside = at < width
    wide = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(y + row + at, mask=inside, other=0.0).to(tl.float32)
        if INNER:
            added = _normal(added, inner, at, inside, width, eps, x, CENTERED)
        if GATES:
            opened = _tanh(tl.load(gate).to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
            added = (added * opened).to(x.dtype.element_ty).to(tl.float32)
        wide = (wide + added).to(x.dtype.element_ty).to(tl.float32)
        if SCALES:
            wide = (wide * tl.load(factor).to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
        tl.store(total + row + at, wide.to(total.dtype.element_ty), mask=inside)
    if OUTER:
        normal = _normal(wide, outer, at, inside, width, eps, x, CENTERED)
        tl.store(out + row + at, normal.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, centered: bool = False) -> Tensor:
    """Return the norm of x (..., width). Its twins are `reference.rms_norm` and `centered_rms_norm`."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    _add_norm[(x.numel() // width,)](
        x, x, weight, weight, weight, weight, x, out, width, eps,
        WIDTH=next_power(width), ADDS=False, INNER=False, OUTER=True, SCALES=False, GATES=False,
        CENTERED=centered,
    )  # fmt: skip
    return out


def add_norm(
    x: Tensor, y: Tensor, inner: Tensor | None, outer: Tensor | None, eps: float, *, centered: bool = False,
    factor: Tensor | None = None, gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Do the work of `kernels.base.Kernels.add_norm`. x and y are (rows, width)."""
    x, y = x.contiguous(), y.contiguous()
    total, width = torch.empty_like(x), x.shape[-1]
    out = total if outer is None else torch.empty_like(x)
    _add_norm[(len(x),)](
        x, y, x if inner is None else inner, x if outer is None else outer, x if factor is None else factor,
        x if gate is None else gate, total, out, width, eps,
        WIDTH=next_power(width), ADDS=True, INNER=inner is not None, OUTER=outer is not None,
        SCALES=factor is not None, GATES=gate is not None, CENTERED=centered,
    )  # fmt: skip
    return total, out


SILU, GELU, TANH_GELU, RELU, QUICK_GELU = range(5)
ACTIVATIONS = {
    "silu": SILU, "gelu": GELU, "gelu_pytorch_tanh": TANH_GELU, "gelu_new": TANH_GELU, "relu": RELU,
    "quick_gelu": QUICK_GELU,
}  # fmt: skip
"""Numbers of the activations in `kernels.activation`."""


@triton.jit
def sigmoid(x):
    """Return the sigmoid, without an exponential that may be infinite."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def activate(gate, KIND: tl.constexpr):
    """Return an activation of numbers in float32. KIND: its number in ACTIVATIONS."""
    if KIND == 0:
        active = gate * sigmoid(gate)
    elif KIND == 1:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == 2:  # (1 + tanh(a)) / 2 is the sigmoid of 2a
        active = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif KIND == 3:
        active = tl.maximum(gate, 0.0)
    else:
        active = gate * sigmoid(1.702 * gate)
    return active


@triton.jit
def _gate(x, out, width, stride, SIZE: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < width
    gate = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    active = activate(gate, KIND)
    active = active.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * stride + at, (active * up).to(out.dtype.element_ty), mask=inside)


def aligned_rows(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialised tensor whose rows begin at multiples of 16 bytes.

    The fastest products of cuBLAS read 16 bytes at a time. Rows of other sizes, such as the 3,420 numbers in
    the MLPs of Qwen2.5-VL's tower, are a part of longer ones.
    """
    width = shape[-1]
    if width % ALIGNED == 0:
        return like.new_empty(shape)
    return like.new_empty((*shape[:-1], width + -width % LINE))[..., :width]


def gate(x: Tensor, activation: str, *, aligned: bool = False) -> Tensor:
    """Return the activated first half of the rows of x (..., 2 * width), times the second half.

    aligned: return `aligned_rows`, which may not be contiguous.
    """
    x = x.contiguous()
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    out = aligned_rows(x, *shape) if aligned else x.new_empty(shape)
    grid = (x.numel() // (2 * shape[-1]), triton.cdiv(shape[-1], GATE_TILE))
    stride = out.stride(-2) if out.dim() > 1 else shape[-1]
    _gate[grid](x, out, shape[-1], stride, SIZE=GATE_TILE, KIND=ACTIVATIONS[activation])
    return out


@triton.jit
def _open(x, gate, out, x_stride, gate_stride, width, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < width
    factor = sigmoid(tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32))
    wide = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    wide *= factor.to(gate.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, wide.to(out.dtype.element_ty), mask=inside)


def open_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Do the work of `kernels.base.Kernels.open`."""
    x, gate = (part if part.stride(1) == 1 else part.contiguous() for part in (x, gate))
    rows, width = x.shape
    out = x.new_empty((rows, width))
    grid = (rows, triton.cdiv(width, GATE_TILE))
    _open[grid](x, gate, out, x.stride(0), gate.stride(0), width, SIZE=GATE_TILE)
    return out


def finish(
    y: Tensor, activation: str | None, gated: bool, residual: Tensor | None, *, aligned: bool = False
) -> Tensor:
    """Do the work of `activation.finish`. A gated activation is one launch. aligned: see `gate`."""
    if gated and activation is not None:
        y = gate(y, activation, aligned=aligned)
        return y if residual is None else residual + y
    return plain_finish(y, activation, gated, residual)


@triton.jit
def _rotate_store(
    qkv, cos, sin, query_weight, key_weight, value_weight, query, kv, scales, slots, stride, heads, kv_heads,
    dim, rotary, eps, block_size, page,
    DIM: tl.constexpr, NORMS: tl.constexpr, CENTERED: tl.constexpr, VALUE_NORM: tl.constexpr,
    SHARED_VALUES: tl.constexpr, STORES: tl.constexpr, MOST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute one head of one row. Rotation needs number i and i + rotary / 2 together, so it reads twice."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, DIM)
    inside, turning = at < dim, at < rotary
    half = rotary // 2
    partner = tl.where(turning, tl.where(at < half, at + half, at - half), at)
    place = head
    if SHARED_VALUES:
        place = tl.where(head >= heads + kv_heads, head - kv_heads, head)
    source = qkv + row * stride + place * dim
    own = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if head < heads + kv_heads:
        other = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            weight = query_weight
            if head >= heads:
                weight = key_weight
            inverse = tl.rsqrt(tl.sum(own * own, axis=0) / dim + eps)
            own_factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
            other_factor = tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32)
            if CENTERED:
                own *= inverse * (1.0 + own_factor)
                other *= inverse * (1.0 + other_factor)
            else:
                own = (own * inverse).to(qkv.dtype.element_ty).to(tl.float32) * own_factor
                other = (other * inverse).to(qkv.dtype.element_ty).to(tl.float32) * other_factor
            own = own.to(qkv.dtype.element_ty).to(tl.float32)
            other = other.to(qkv.dtype.element_ty).to(tl.float32)
        turned = tl.where(at < half, -other, other)
        angle = row * rotary + at
        own = own * tl.load(cos + angle, mask=turning, other=1.0) + turned * tl.load(
            sin + angle, mask=turning, other=0.0
        )
    else:
        if VALUE_NORM:
            own = _normal(own, value_weight, at, inside, dim, eps, qkv, False)
    if head < heads:
        tl.store(query + (row * heads + head) * dim + at, own.to(query.dtype.element_ty), mask=inside)
    else:
        if STORES:
            # Keys before values: they have this order both in the row and in a slot.
            slot = tl.load(slots + row)
            block, place = slot // block_size, (slot % block_size) * 2 * kv_heads + head - heads
            if MOST:
                own = own.to(qkv.dtype.element_ty).to(tl.float32)
                own = _levels(own, inside, scales + block * (page // 2) + place, MOST, WHOLE)
            tl.store(kv + block * page + place * dim + at, own.to(kv.dtype.element_ty), mask=inside)


@triton.jit
def _levels(numbers, inside, scale, MOST: tl.constexpr, WHOLE: tl.constexpr):
    """Return the levels of a head's numbers in float32, and store their scale, as `pages.round_heads`."""
    most = tl.max(tl.where(inside, tl.abs(numbers), 0.0), axis=0)
    most += tl.sum(tl.where(inside, numbers * 0.0, 0.0), axis=0)  # NaN if a number is not finite
    # Rounded to bfloat16 here, to the nearest: Triton's interpreter would cut the lower bits off.
    bits = tl.div_rn(most, most * 0.0 + MOST).to(tl.int32, bitcast=True)
    wide = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    tl.store(scale, wide.to(tl.bfloat16))
    real = wide > 1e-30
    levels = numbers * tl.where(real, tl.div_rn(wide * 0.0 + 1.0, tl.where(real, wide, 1.0)), 0.0)
    if WHOLE:  # adding 1.5 * 2**23 rounds to a whole number
        levels = (levels + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(levels, -MOST), MOST)


def addressed(kv: KV) -> tuple[tuple[Tensor, Tensor], int]:
    """Return the tensors of pages whose addresses a kernel gets, and the numbers from one page to the next.

    The second tensor holds the scales; without scales it is the first one.
    """
    if isinstance(kv, Tensor):
        return (kv, kv), kv[:1].numel()
    return (kv.levels, kv.scales), kv.levels[0].numel() + SCALE.itemsize * kv.scales[0].numel()


def rotate_store(
    qkv: Tensor, heads: int, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float,
    kv: KV | None, slots: Tensor | None, *, centered: bool = False, value_norm: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Do the work of `kernels.base.Kernels.rotate_store`. qkv is not changed."""
    rows, present, dim = qkv.shape
    if qkv.stride()[1:] != (dim, 1):
        qkv = qkv.contiguous()
    kv_heads = 0 if kv is None else kv.shape[3]
    query = qkv.new_empty((rows, heads, dim))
    query_weight, key_weight = (qkv, qkv) if norms is None else norms
    pointers, page = ((query, query), 0) if kv is None else addressed(kv)
    format = kv.format if isinstance(kv, QuantizedKV) else None
    _rotate_store[(rows, heads + 2 * kv_heads)](
        qkv, cos, sin, query_weight, key_weight, qkv if value_norm is None else value_norm, query,
        *pointers, cos if slots is None else slots, qkv.stride(0), heads, kv_heads, dim, cos.shape[-1], eps,
        1 if kv is None else kv.shape[1], page,
        DIM=next_power(dim), NORMS=norms is not None, CENTERED=centered, VALUE_NORM=value_norm is not None,
        SHARED_VALUES=present == heads + kv_heads, STORES=kv is not None,
        MOST=0.0 if format is None else format.most, WHOLE=format is INT8,
    )  # fmt: skip
    return query
