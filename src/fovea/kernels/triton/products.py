"""Products with quantized weights, and with the weights of many experts at once, on a GPU.

Every program computes one tile of outputs. It reads packed weights and turns them into numbers of the rows'
type in registers, so the GPU's memory sends 4 or 8 bits for each weight. Few rows are few tiles. Then k is
cut into splits, so that small products still occupy the whole GPU, and a second launch adds the splits.

Rows of experts are sorted by expert. Only the device knows how many rows each expert has. So there are as
many programs as there could be tiles, and each finds its expert by the numbers of rows; the last ones may
find none. Nothing is read on the host, and launches can be replayed from a graph.

The weights of int8 and int4 lie in the order group, output, byte. So a tile is one run of bytes in memory. A
byte of int4 has a level of the first half of its group, and one of the second half, so that both multiply
runs of columns of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fovea.kernels.codes import Format
from fovea.kernels.float8 import FLOAT8, FLOAT8_MAX, FP8, MIN_SCALE, STEP, round_rows
from fovea.kernels.triton.rows import ACTIVATIONS, activate, next_power

PLAIN_STEP = 64
"""Columns of weights without groups that a program multiplies at a time."""
MAX_SPLITS = 16
PROGRAMS = 4
"""Number of programs per processor that splits of k aim at."""
CHOSEN_STEP = 256
"""Columns of weights without groups that a program multiplies at a time with one row."""
CHOSEN_TILE = 16
"""Outputs of one row and one expert that a program computes."""
SUM_TILE = 1024
"""Numbers of a row that one program adds over the splits."""


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight of one product, or those of several experts, (n, k) each.

    values: int8 and int4: (experts, groups, n, bytes of a group); else (experts, n, k), float8 or plain.
    scale: int8 and int4: (experts, groups, n) bfloat16; fp8: (experts, n) float32; plain: None.
    table: int4: the 16 levels in the type of the rows; else None.
    bits: bits of a level; 0: the values are floating-point numbers.
    width: columns that a program multiplies at a time: a group, if there are groups.
    """

    values: Tensor
    scale: Tensor | None
    table: Tensor | None
    bits: int
    width: int
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)


def pack(weights: Tensor, format: Format | None) -> Weight:
    """Pack weights (experts, n, k) in a format; None: they stay as they are, without a copy."""
    experts, n, k = weights.shape
    if format is None:
        return Weight(weights.contiguous(), None, None, 0, PLAIN_STEP, n, k)
    if format is FP8:
        rounded = [round_rows(weight) for weight in weights]
        values, scale = (torch.stack([pair[part] for pair in rounded]) for part in (0, 1))
        return of_float8(values, scale[..., 0])
    groups, device = -(-k // format.group), weights.device
    kind = torch.int8 if format.bits == 8 else torch.uint8
    shape = experts, groups, n
    values = torch.empty(*shape, format.group * format.bits // 8, dtype=kind, device=device)
    scale = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for expert, weight in enumerate(weights):
        plain = TorchQuantizedProduct(weight, None, None, False, format)
        levels = plain.values if format.bits == 8 else _pack_halves(plain.values)
        values[expert], scale[expert] = levels.transpose(0, 1), plain.scale.T
    table = torch.tensor(INT4_LEVELS, dtype=weights.dtype, device=device) if format.bits == 4 else None
    return Weight(values, scale, table, format.bits, format.group, n, k)


def of_float8(values: Tensor, scale: Tensor) -> Weight:
    """Return weights in 8-bit floats. values: (experts, n, k), contiguous. scale: (experts, n)."""
    return Weight(values, scale.contiguous(), None, 0, PLAIN_STEP, values.shape[1], values.shape[2])


def _pack_halves(values: Tensor) -> Tensor:
    """Pack codes of int4 in another order: the first half of a group in the low halves of its bytes."""
    first, last = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).chunk(2, dim=-1)
    return first | last << 4


@triton.jit
def _columns(x, row, real, first, k, WIDTH: tl.constexpr):
    """Load columns first..first+WIDTH-1 of rows of x, a matrix with k columns. Other rows are zeros."""
    at = first + tl.arange(0, WIDTH)
    return tl.load(x + row[:, None] * k + at[None, :], mask=real[:, None] & (at < k)[None, :], other=0.0)


@triton.jit
def _store_columns(out, row, real, first, k, numbers, WIDTH: tl.constexpr):
    at = first + tl.arange(0, WIDTH)
    mask = real[:, None] & (at < k)[None, :]
    tl.store(out + row[:, None] * k + at[None, :], numbers.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _multiply(
    x, values, scale, table, bias, residual, out, counts, rows, n, k, steps, experts, weight_size, scale_size,
    BITS: tl.constexpr, ROW_SCALE: tl.constexpr, EXPERTS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BYTES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a tile (M, N) of one split. EXPERTS: power of two of at least the experts; 0: one weight."""
    tile, split = tl.program_id(0), tl.program_id(2)
    first, last = tile * M, rows
    if EXPERTS > 0:
        number = tl.arange(0, EXPERTS)
        count = tl.load(counts + number, mask=number < experts, other=0).to(tl.int32)
        tiles = (count + M - 1) // M
        expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
        if expert >= EXPERTS:
            return
        begin = tl.sum(tl.where(number < expert, count, 0), axis=0)
        first = begin + (tile - tl.sum(tl.where(number < expert, tiles, 0), axis=0)) * M
        last = begin + tl.sum(tl.where(number == expert, count, 0), axis=0)
        values += expert.to(tl.int64) * weight_size
        scale += expert.to(tl.int64) * scale_size
    j = tl.arange(0, N)
    row = first + tl.arange(0, M)
    column = (tl.program_id(1) * N).to(tl.int64)
    real_m, real_n = row < last, column + j < n
    row = row.to(tl.int64)
    span = tl.cdiv(steps, tl.num_programs(2))
    total = tl.zeros((M, N), tl.float32)
    # With its number of stages given, Triton also loads packed int4 ahead, whose levels are a second load.
    for step in tl.range(split * span, tl.minimum(split * span + span, steps), num_stages=STAGES):
        if BITS == 0:
            weight = _columns(values + column * k, j, real_n, step * K, k, K).to(x.dtype.element_ty)
            part = _columns(x, row, real_m, step * K, k, K)
            total += tl.dot(part, tl.trans(weight), input_precision="ieee")
        else:
            group = column + step * n + j
            at = group[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
            packed = tl.load(values + at, mask=real_n[:, None], other=0)
            factor = tl.load(scale + group, mask=real_n, other=0.0).to(tl.float32)
            # Levels are exact in every type, so only sums are rounded.
            part = _columns(x, row, real_m, step * K, k, BYTES)
            if BITS == 8:
                sums = tl.dot(part, tl.trans(packed.to(x.dtype.element_ty)), input_precision="ieee")
            else:
                low, high = tl.load(table + (packed & 15)), tl.load(table + (packed >> 4))
                sums = tl.dot(part, tl.trans(low), input_precision="ieee")
                part = _columns(x, row, real_m, step * K + BYTES, k, BYTES)
                sums = tl.dot(part, tl.trans(high), sums, input_precision="ieee")
            total += sums * factor[None, :]
    if ROW_SCALE:
        total *= tl.load(scale + column + j, mask=real_n, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + column + j, mask=real_n, other=0.0).to(tl.float32)[None, :]
    mask = real_m[:, None] & real_n[None, :]
    at = row[:, None] * n + (column + j)[None, :]
    if RESIDUAL:
        total = total.to(x.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + split.to(tl.int64) * rows * n + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _row_sums(
    x, values, scale, table, column, real, n, k, steps,
    BITS: tl.constexpr, ROW_SCALE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Multiply one row by some columns of a weight: sums (N,) float32. column: (N,), their numbers."""
    total = tl.zeros((N, BYTES), tl.float32)
    for step in range(steps):
        if BITS == 0:
            at = step * K + tl.arange(0, BYTES)
            mask = real[:, None] & (at < k)[None, :]
            weight = tl.load(values + column[:, None] * k + at[None, :], mask=mask, other=0.0)
            weight = weight.to(x.dtype.element_ty).to(tl.float32)
            total += weight * tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)[None, :]
        else:
            group = step * n + column
            at = step * K + tl.arange(0, BYTES)
            place = group[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
            packed = tl.load(values + place, mask=real[:, None], other=0)
            factor = tl.load(scale + group, mask=real, other=0.0).to(tl.float32)[:, None]
            part = tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)[None, :]
            if BITS == 8:
                total += packed.to(tl.float32) * part * factor
            else:
                low = tl.load(table + (packed & 15)).to(tl.float32) * part
                part = tl.load(x + at + BYTES, mask=at + BYTES < k, other=0.0).to(tl.float32)[None, :]
                total += (low + tl.load(table + (packed >> 4)).to(tl.float32) * part) * factor
    sums = tl.sum(total, axis=1)
    if ROW_SCALE:
        sums *= tl.load(scale + column, mask=real, other=0.0)
    return sums


@triton.jit
def _chosen(
    x, values, scale, table, chosen, out, places, n, k, steps, weight_size, scale_size, width,
    BITS: tl.constexpr, ROW_SCALE: tl.constexpr, KIND: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of one row and one of its experts. KIND: a gated activation; -1: none."""
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(chosen + pair).to(tl.int64)
    x += pair // places * k
    values += expert * weight_size
    scale += expert * scale_size
    column = tl.program_id(1).to(tl.int64) * N + tl.arange(0, N)
    real = column < width
    sums = _row_sums(x, values, scale, table, column, real, n, k, steps, BITS, ROW_SCALE, N, K, BYTES)
    if KIND >= 0:
        up = _row_sums(
            x, values, scale, table, column + width, real, n, k, steps, BITS, ROW_SCALE, N, K, BYTES
        )
        sums = activate(sums.to(x.dtype.element_ty).to(tl.float32), KIND)
        sums = sums.to(x.dtype.element_ty).to(tl.float32) * up.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + pair * width + column, sums.to(out.dtype.element_ty), mask=real)


@triton.jit
def _add_splits(
    sums, bias, residual, out, splits, size, n,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * n
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    total = tl.zeros((SIZE,), tl.float32)
    for split in range(splits):
        total += tl.load(sums + split * size + row + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _unpack(
    values, scale, table, out, n, k, first, last,
    BITS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Turn a group of N outputs into plain numbers. out: (last - first, k)."""
    group, row = tl.program_id(0), tl.program_id(1) * N + tl.arange(0, N)
    real = first + row < last
    start = group.to(tl.int64) * n + first + row
    at = start[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    packed = tl.load(values + at, mask=real[:, None], other=0)
    factor = tl.load(scale + start, mask=real, other=0.0).to(tl.float32)[:, None]
    row = row.to(tl.int64)
    if BITS == 8:
        _store_columns(out, row, real, group * K, k, packed.to(tl.float32) * factor, BYTES)
    else:
        low, high = tl.load(table + (packed & 15)), tl.load(table + (packed >> 4))
        _store_columns(out, row, real, group * K, k, low.to(tl.float32) * factor, BYTES)
        _store_columns(out, row, real, group * K + BYTES, k, high.to(tl.float32) * factor, BYTES)


@triton.jit
def _round_rows(x, values, scale, width, padded, most, least, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    wide = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(wide), axis=0) / most, least)
    tl.store(scale + row, factor)
    rounded = tl.minimum(tl.maximum(wide / factor, -most), most).to(values.dtype.element_ty)
    tl.store(values + row * padded + at, rounded, mask=at < padded)


def multiply(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, counts: Tensor | None,
    processors: int,
) -> Tensor:  # fmt: skip
    """Return x W^T + bias + residual, (rows, n), in the type of x.

    x: (rows, k).
    counts: (experts,) int32, rows of each expert, by which the rows are sorted; None: there is one weight.
    """
    x = x.contiguous()
    rows, n = len(x), weight.n
    out = x.new_empty((rows, n))
    if not rows:
        return out
    experts = len(weight.values)
    used = 1 if counts is None else min(rows, experts)  # experts that may have rows
    m = min(64, max(16, next_power(-(-rows // used))))
    side = 128 if m > 32 and weight.bits != 8 else 64  # so that older GPUs have enough shared memory
    tiles, columns = -(-rows // m) + used - 1, -(-n // side)
    steps = -(-weight.k // weight.width)
    count = splits(tiles * columns, m, steps, processors) if counts is None else 1
    target = out if count == 1 else x.new_empty((count, rows, n), dtype=torch.float32)
    scale, table = (x if part is None else part for part in (weight.scale, weight.table))
    added = (None, None) if count > 1 else (bias, residual)
    _multiply[(tiles, columns, count)](
        x, weight.values, scale, table, *(x if part is None else part for part in added), target,
        x if counts is None else counts, rows, n, weight.k, steps, experts,
        weight.values[0].numel(), 0 if weight.scale is None else weight.scale[0].numel(),
        BITS=weight.bits, ROW_SCALE=weight.scale is not None and not weight.bits,
        EXPERTS=0 if counts is None else next_power(experts), BIAS=added[0] is not None,
        RESIDUAL=added[1] is not None, M=m, N=side, K=weight.width,
        BYTES=weight.values.shape[-1] if weight.bits else 0,
        STAGES=3 if m > 32 else 6 if weight.bits == 4 else 4, num_warps=8 if m > 32 else 4,
    )  # fmt: skip
    if count > 1:
        _add_splits[(rows, -(-n // SUM_TILE))](
            target, out if bias is None else bias, out if residual is None else residual, out,
            count, rows * n, n,
            BIAS=bias is not None, RESIDUAL=residual is not None, SIZE=SUM_TILE,
        )  # fmt: skip
    return out


def multiply_chosen(x: Tensor, weight: Weight, chosen: Tensor, activation: str | None) -> Tensor:
    """Multiply each row with the weights of its experts. Returns (rows * places, outputs).

    Nothing is sorted, and a result depends on its row alone. An expert's weight is read for each of its rows.

    x: (rows, k). chosen: (rows, places), contiguous, numbers of experts.
    activation: a gated one, after which a result is half as wide; None: there is none.
    """
    x, (rows, places) = x.contiguous(), chosen.shape
    width = weight.n if activation is None else weight.n // 2
    out = x.new_empty((rows * places, width))
    scale, table = (x if part is None else part for part in (weight.scale, weight.table))
    step = weight.width if weight.bits else CHOSEN_STEP
    _chosen[(rows * places, -(-width // CHOSEN_TILE))](
        x, weight.values, scale, table, chosen, out, places, weight.n, weight.k, -(-weight.k // step),
        weight.values[0].numel(), 0 if weight.scale is None else weight.scale[0].numel(), width,
        BITS=weight.bits, ROW_SCALE=weight.scale is not None and not weight.bits,
        KIND=-1 if activation is None else ACTIVATIONS[activation], N=CHOSEN_TILE, K=step,
        BYTES=weight.values.shape[-1] if weight.bits else step,
    )  # fmt: skip
    return out


def splits(tiles: int, m: int, steps: int, processors: int) -> int:
    """Return into how many parts k is cut: a power of two, so that few variants are compiled.

    Splits of many rows are large, because each split writes its sums in float32.

    tiles: tiles of outputs. m: rows of a tile. steps: steps over k.
    """
    wanted = min(PROGRAMS * processors * 16 // (m * tiles), MAX_SPLITS, steps)
    return next_power(wanted + 1) // 2 if wanted > 1 else 1


def unpack(weight: Weight, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Return the outputs first..last-1 of a weight in int8 or int4 as plain numbers, (last - first, k)."""
    assert weight.scale is not None
    out = torch.empty((last - first, weight.k), dtype=dtype, device=weight.values.device)
    table = out if weight.table is None else weight.table
    _unpack[(weight.values.shape[1], -(-(last - first) // 64))](
        weight.values, weight.scale, table, out, weight.n, weight.k, first, last,
        BITS=weight.bits, N=64, K=weight.width, BYTES=weight.values.shape[-1],
    )  # fmt: skip
    return out


def round_input(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows (n, k) to float8_e4m3fn, padded with zeros to a multiple of STEP. One launch.

    Returns them and their scales, (n, 1) float32. Its twin is `quantize.round_padded`.
    """
    x = x.contiguous()
    (rows, width), device = x.shape, x.device
    padded = -(-width // STEP) * STEP
    values = torch.empty((rows, padded), dtype=FLOAT8, device=device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=device)
    size = next_power(padded)
    _round_rows[(rows,)](
        x, values, scale, width, padded, FLOAT8_MAX, MIN_SCALE, WIDTH=size,
        num_warps=min(16, max(4, size // 1024)),
    )  # fmt: skip
    return values, scale
