"""Layers with a state on a GPU: one new token of each sequence, in one launch for all sequences.

States are read and written in their slots, so no copy of a state is made. The slots are numbers on the
device, and a row without a state (NO_SLOT) is possible: so a graph can record these launches. Twins of the
kernels are `_conv_decodes` and `_one_token` in `torch_kernels`, and `reference.gated_norm`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fovea.kernels.states import Decodes
from fovea.kernels.torch_kernels import NORM_EPS
from fovea.kernels.triton.rows import ACTIVATIONS, activate, next_power, sigmoid

CONV_TILE = 256
"""Channels that one program convolves."""
VALUE_TILE = 32
"""Columns of a head's state that one program computes. They do not depend on the others."""


@triton.jit
def _conv(
    x, weight, bias, state, rows, sources, targets, out, stride, row_step, source_step, target_step, channels,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of one row. The state of a slot is (WIDTH - 1, channels)."""
    number = tl.program_id(0)
    row = tl.load(rows + number * row_step)
    source, target = tl.load(sources + number * source_step), tl.load(targets + number * target_step)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < channels
    before = state + source * (WIDTH - 1) * channels + at
    after = state + target * (WIDTH - 1) * channels + at
    own = tl.load(x + row * stride + at, mask=inside, other=0.0)
    sums = tl.zeros((SIZE,), tl.float32)
    for place in tl.static_range(WIDTH - 1):
        token = tl.load(before + place * channels, mask=inside & (source >= 0), other=0.0).to(tl.float32)
        sums += token * tl.load(weight + place * channels + at, mask=inside, other=0.0).to(tl.float32)
    sums += own.to(tl.float32) * tl.load(weight + (WIDTH - 1) * channels + at, mask=inside, other=0.0).to(
        tl.float32
    )
    if BIAS:
        sums += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if KIND >= 0:
        sums = activate(sums.to(x.dtype.element_ty).to(tl.float32), KIND)
    tl.store(out + row * channels + at, sums.to(out.dtype.element_ty), mask=inside)
    # The two slots may be the same. A token moves by one place, and is read before that is written.
    for place in tl.static_range(WIDTH - 2):
        token = tl.load(before + (place + 1) * channels, mask=inside & (source >= 0), other=0.0)
        tl.debug_barrier()
        tl.store(after + place * channels, token, mask=inside & (target >= 0))
    tl.debug_barrier()
    tl.store(after + (WIDTH - 2) * channels, own.to(state.dtype.element_ty), mask=inside & (target >= 0))


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor, decodes: Decodes,
    out: Tensor,
) -> None:  # fmt: skip
    """Do the work of `kernels.base.Kernels.short_conv` for single tokens. Writes their rows of `out`."""
    if x.stride(1) != 1:
        x = x.contiguous()
    width, channels = weight.shape
    rows, sources, targets = decodes.rows, decodes.sources, decodes.targets
    _conv[(len(rows), triton.cdiv(channels, CONV_TILE))](
        x, weight, weight if bias is None else bias, state, rows, sources, targets, out, x.stride(0),
        rows.stride(0), sources.stride(0), targets.stride(0), channels,
        WIDTH=width, BIAS=bias is not None, KIND=-1 if activation is None else ACTIVATIONS[activation],
        SIZE=CONV_TILE,
    )  # fmt: skip


@triton.jit
def _softplus(x):
    """Return log(1 + e^x). log(u) times e^x / (u - 1) makes up for the rounding of u = 1 + e^x."""
    power = tl.exp(tl.minimum(x, 20.0))
    sum = 1.0 + power
    rounded = sum - 1.0
    small = tl.where(rounded == 0.0, power, tl.log(sum) * (power / tl.where(rounded == 0.0, 1.0, rounded)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def _delta(
    qkv, beta, step, rate, bias, state, rows, sources, targets, out, stride, beta_stride, step_stride,
    row_step, source_step, target_step, heads, key_heads, key_dim, value_dim, eps, scale,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the state of one head for one row, and of the row's output."""
    number, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + number * row_step)
    source, target = tl.load(sources + number * source_step), tl.load(targets + number * target_step)
    keys, values = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    real, inside = keys < key_dim, values < value_dim
    start = qkv + row * stride + head // (heads // key_heads) * key_dim + keys
    query = tl.load(start, mask=real, other=0.0).to(tl.float32)
    key = tl.load(start + key_heads * key_dim, mask=real, other=0.0).to(tl.float32)
    query = query * tl.rsqrt(tl.sum(query * query, axis=0) + eps) * scale
    key = key * tl.rsqrt(tl.sum(key * key, axis=0) + eps)
    value = tl.load(
        qkv + row * stride + 2 * key_heads * key_dim + head * value_dim + values, mask=inside, other=0.0
    ).to(tl.float32)
    strength = sigmoid(tl.load(beta + row * beta_stride + head).to(tl.float32))
    strength = strength.to(beta.dtype.element_ty).to(tl.float32)
    size = tl.load(step + row * step_stride + head).to(tl.float32) + tl.load(bias + head)
    decay = tl.exp(-tl.exp(tl.load(rate + head)) * _softplus(size))
    at = head * key_dim * value_dim + keys[:, None] * value_dim + values[None, :]
    both = real[:, None] & inside[None, :]
    slot = heads * key_dim * value_dim
    matrix = tl.load(state + source * slot + at, mask=both & (source >= 0), other=0.0) * decay
    change = (value - tl.sum(key[:, None] * matrix, axis=0)) * strength
    matrix += key[:, None] * change[None, :]
    tl.store(state + target * slot + at, matrix, mask=both & (target >= 0))
    result = tl.sum(query[:, None] * matrix, axis=0)
    tl.store(out + (row * heads + head) * value_dim + values, result.to(out.dtype.element_ty), mask=inside)


def delta(
    qkv: Tensor, beta: Tensor, step: Tensor, rates: tuple[Tensor, Tensor], key_heads: int, state: Tensor,
    decodes: Decodes, out: Tensor,
) -> None:  # fmt: skip
    """Do the work of `kernels.base.Kernels.gated_delta` for single tokens. Writes their rows of `out`.

    out: (T, value_heads * value_dim), contiguous.
    """
    heads, key_dim, value_dim = state.shape[1:]
    rows, sources, targets = decodes.rows, decodes.sources, decodes.targets
    values = min(VALUE_TILE, next_power(value_dim))
    _delta[(len(rows), heads, triton.cdiv(value_dim, values))](
        qkv, beta, step, *rates, state, rows, sources, targets, out, qkv.stride(0), beta.stride(0),
        step.stride(0), rows.stride(0), sources.stride(0), targets.stride(0), heads, key_heads, key_dim,
        value_dim, NORM_EPS, key_dim**-0.5,
        KEYS=next_power(key_dim), VALUES=values,
    )  # fmt: skip


@triton.jit
def _gated_norm(x, gate, weight, out, stride, heads, width, eps, WIDTH: tl.constexpr):
    """Compute one head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDTH)
    inside = at < width
    place = (row * heads + head) * width + at
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normal = (wide * inverse).to(x.dtype.element_ty).to(tl.float32)
    normal *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    normal = normal.to(x.dtype.element_ty).to(tl.float32)
    open = tl.load(gate + row * stride + head * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (normal * open * sigmoid(open)).to(out.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do the work of `kernels.base.Kernels.gated_norm`."""
    rows, heads, width = x.shape
    x = x.contiguous()
    if gate.stride()[1:] != (width, 1):
        gate = gate.contiguous()
    out = x.new_empty(x.shape)
    _gated_norm[(rows, heads)](
        x, gate, weight, out, gate.stride(0), heads, width, eps, WIDTH=next_power(width)
    )
    return out
