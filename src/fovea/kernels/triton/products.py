"""Products with quantized weights, and with the weights of many experts at once, on a GPU.

Every program computes one tile of outputs. It reads packed weights and turns them into numbers of the rows'
type in registers, so the GPU's memory sends 4 or 8 bits for each weight. Few rows are few tiles. Then k is
cut into splits, so that small products still occupy the whole GPU, and a second launch adds the splits.

Rows of experts are sorted by expert. Only the device knows how many rows each expert has. So there are as
many programs as there could be tiles, and each finds its expert by the numbers of rows; the last ones may
find none. Nothing is read on the host, and launches can be replayed from a graph.

Codes are packed in one of two ways. Both lie in the order step, output, byte, so that a tile is one run of
bytes in memory.

- Levels: 8-bit codes whose groups have 128 values or more and no minimum, less their common zero, are small
  numbers with a sign. Every type of rows holds them exactly. A product of a group is multiplied by its scale,
  one multiplication for 128 weights.
- Words: every other scheme. A word of 32 bits has eight codes of 4 bits, or four of 8 bits, each of another
  run of 16 columns. The values are computed in float32, before they are rounded to the type of the rows and
  multiplied. With small groups that takes less than scaling the sums of each group: scale and minimum would
  take two operations for each sum, and the minimum also the sum of the row's group, which has to be moved
  between threads. Only shifts of words are needed to place a code, no extraction of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from fovea.kernels.codes import Codes, Format, join
from fovea.kernels.float8 import FLOAT8, FLOAT8_MAX, FP8, MIN_SCALE, STEP, round_rows
from fovea.kernels.quantize import QUANTIZE_WEIGHTS_ON_GPU, quantize
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


LEVELS_STEP = 128
"""Columns of levels that a program multiplies at a time."""
WORDS = 16
"""Words of an output in a step, and columns that a dot product of values multiplies: its least number."""
ROW_GROUP = 1 << 30
"""The group of a weight with one scale per output."""
NO_OFFSET, ZEROS, MINIMA = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight of one product, or those of several experts, (n, k) each.

    values: words (experts, steps, n, WORDS) int32, levels (experts, steps, n, LEVELS_STEP) int8; else
        (experts, n, k), float8 or plain.
    scale: of codes (experts, groups, n): float numbers, or pairs of a scale and an offset, of float16 in an
        int32 or of float32 in an int64; fp8: (experts, n) float32; plain: None.
    bits: bits of a code, 4 or 8; 0: the values are floating-point numbers.
    width: columns that a program multiplies at a time.
    group: columns that share a scale; 0 without codes.
    offset: NO_OFFSET, or what is in pairs with scales: ZEROS or MINIMA.
    zero: the code that stands for zero in words, unless they have offsets.
    """

    values: Tensor
    scale: Tensor | None
    bits: int
    width: int
    n: int
    k: int
    group: int = 0
    offset: int = NO_OFFSET
    zero: int = 0

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)

    @property
    def words(self) -> bool:
        return self.values.dtype is torch.int32

    @property
    def scheme(self) -> tuple[object, ...]:
        """The properties that decide which variants of the kernels multiply with this weight."""
        kind = None if self.scale is None else self.scale.dtype
        return self.bits, self.words, self.group, self.offset, self.zero, kind

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of codes as values: (len(ids), k) float32, exactly those of `Codes`."""
        assert self.scale is not None
        values, scale = self.values[0][:, ids], self.scale[0][:, ids]
        offset: Tensor | None = None
        if self.offset != NO_OFFSET:
            pair = torch.float16 if scale.dtype is torch.int32 else torch.float32
            scale, offset = scale.view(pair).unflatten(-1, (-1, 2)).float().unbind(-1)
        if self.words:
            shifts = torch.arange(0, 32, self.bits, device=values.device, dtype=torch.int32)
            values = (values[..., None, :] >> shifts[:, None] & (1 << self.bits) - 1).flatten(-2) - self.zero
        wide = values.transpose(0, 1).flatten(1)[:, : self.k].float()
        zero = 0 if offset is None or self.offset == MINIMA else self._wide(offset)
        wide = (wide - zero) * self._wide(scale.float())
        return wide if offset is None or self.offset == ZEROS else wide + self._wide(offset)

    def _wide(self, groups: Tensor) -> Tensor:
        """Repeat numbers (groups, rows) for each column: (rows, k)."""
        return groups.T.repeat_interleave(min(self.group, self.k), dim=1)[:, : self.k]


def pack(weights: Tensor, format: Format | None) -> Weight:
    """Pack weights (experts, n, k) in a format; None: they stay as they are, without a copy."""
    _, n, k = weights.shape
    if format is None:
        return Weight(weights.contiguous(), None, 0, PLAIN_STEP, n, k)
    if format is FP8:
        rounded = [round_rows(weight) for weight in weights]
        values, scale = (torch.stack([pair[part] for pair in rounded]) for part in (0, 1))
        return of_float8(values, scale[..., 0])
    return pack_codes([quantized_codes(weight, format) for weight in weights])


def of_float8(values: Tensor, scale: Tensor) -> Weight:
    """Return weights in 8-bit floats. values: (experts, n, k), contiguous. scale: (experts, n)."""
    return Weight(values, scale.contiguous(), 0, PLAIN_STEP, values.shape[1], values.shape[2])


def quantized_codes(weight: Tensor, format: Format) -> Codes:
    """Quantize a weight (n, k) to INT8 or INT4, some rows at a time."""
    step = max(1, QUANTIZE_WEIGHTS_ON_GPU // weight.shape[1])
    return join([quantize(weight[first : first + step], format) for first in range(0, len(weight), step)])


def packs(codes: Codes) -> bool:
    """Whether codes can be packed. A dot product multiplies 16 columns, which must share a scale."""
    if codes.minimum is not None and (isinstance(codes.zero, Tensor) or codes.zero != 0):
        return False
    return codes.scale.shape[1] == 1 or codes.group % WORDS == 0


def pack_codes(experts: Sequence[Codes]) -> Weight:
    """Pack the codes of experts, or of one weight; all of one scheme, for which `packs` is true."""
    first, (n, k) = experts[0], experts[0].shape
    group = ROW_GROUP if first.scale.shape[1] == 1 else first.group
    plain = first.minimum is None and isinstance(first.zero, int)
    levels = (
        plain and first.bits > 4 and (1 << first.bits) - 128 <= first.zero <= 128 and group % LEVELS_STEP == 0
    )
    bits = 4 if first.bits <= 4 else 8
    width = LEVELS_STEP if levels else 32 // bits * WORDS
    steps = -(-k // width)
    groups = -(-steps * width // group)  # of whole steps
    values, scales, offsets = [], [], []
    for codes in experts:
        padded = functional.pad(codes.codes, (0, steps * width - k)).view(n, steps, width).transpose(0, 1)
        if levels:
            values.append((padded - codes.zero).view(torch.int8))  # wraps around, as it should
        else:
            values.append(_words(padded, bits))
        scale, minimum = codes.full_scales()
        offset = codes.zero.float() if isinstance(codes.zero, Tensor) else minimum
        scales.append(_by_group(scale, groups))
        if offset is not None:
            offsets.append(_by_group(offset, groups))
    kinds = [torch.bfloat16, torch.float16] if plain else [torch.float16]
    kind = next((each for each in kinds if all(map(_fits(each), scales + offsets))), torch.float32)
    scale = torch.stack(scales).to(kind)
    if offsets:
        pairs = torch.stack((scale, torch.stack(offsets).to(kind)), dim=-1)
        scale = pairs.view(torch.int32 if kind is torch.float16 else torch.int64)[..., 0]
    placed = NO_OFFSET if plain else ZEROS if first.minimum is None else MINIMA
    zero = first.zero if isinstance(first.zero, int) and not levels else 0
    return Weight(torch.stack(values), scale, bits, width, n, k, group, placed, zero)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (steps, n, width) into words (steps, n, WORDS). Run r has the bits from r * bits on."""
    runs = codes.unflatten(-1, (32 // bits, WORDS)).unbind(-2)
    words = torch.zeros(runs[0].shape, dtype=torch.int32, device=codes.device)
    for number, run in enumerate(runs):
        words |= run.int() << number * bits
    return words


def _by_group(numbers: Tensor, groups: int) -> Tensor:
    """Return numbers (n, groups) in the order of groups, with zeros for groups behind the last column."""
    return functional.pad(numbers, (0, groups - numbers.shape[1])).T


def _fits(kind: torch.dtype) -> Callable[[Tensor], bool]:
    return lambda numbers: torch.equal(numbers.to(kind).float(), numbers)


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
def _factors(scale, at, real, ZERO: tl.constexpr, OFFSET: tl.constexpr, BITS: tl.constexpr):
    """Load factor and shift of groups: value = (2**BITS + code) * factor + shift.

    A pair is one number of 32 or 64 bits, which Triton loads some steps ahead. It does not do that with
    numbers of 16 bits.
    """
    number = tl.load(scale + at, mask=real, other=0)
    if OFFSET == 0:
        factor = number.to(tl.float32)
        shift = -ZERO * factor
    else:
        if scale.dtype.element_ty == tl.int64:
            factor = number.to(tl.int32).to(tl.float32, bitcast=True)
            shift = (number >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        else:
            factor = number.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            shift = (number >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if OFFSET == 1:
            shift = -shift * factor
    return factor, shift - (1 << BITS) * factor


@triton.jit
def _run(words, factor, shift, RUN: tl.constexpr, BITS: tl.constexpr):
    """Return the values of run RUN of 16 columns of words, (N, WORDS) float32.

    The code becomes the first bits behind the point of a float32 between 2**BITS and twice that, which is
    then exactly 2**BITS + code. Conversions of integers have half the rate of this.
    """
    up: tl.constexpr = 23 - BITS - RUN * BITS
    code = words << up if up >= 0 else words >> -up
    number = code & (((1 << BITS) - 1) << (23 - BITS)) | (127 + BITS) << 23
    return number.to(tl.float32, bitcast=True) * factor[:, None] + shift[:, None]


@triton.jit
def _add_step(
    total, x, values, scale, row, real_m, column, j, real_n, step, n, k,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr,
    K: tl.constexpr, WORDS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Add the products of one step to a tile."""
    if BITS == 0:
        weight = _columns(values + column * k, j, real_n, step * K, k, K).to(x.dtype.element_ty)
        part = _columns(x, row, real_m, step * K, k, K)
        total += tl.dot(part, tl.trans(weight), input_precision="ieee")
    elif WORDS == 0:
        at = (column + step * n + j)[:, None] * K + tl.arange(0, K)[None, :]
        levels = tl.load(values + at, mask=real_n[:, None], other=0)
        group = step * K // GROUP * n + column + j
        factor = tl.load(scale + group, mask=real_n, other=0.0).to(tl.float32)
        part = _columns(x, row, real_m, step * K, k, K)
        sums = tl.dot(part, tl.trans(levels.to(x.dtype.element_ty)), input_precision="ieee")
        total += sums * factor[None, :]
    else:
        at = (column + step * n + j)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        words = tl.load(values + at, mask=real_n[:, None], other=0)
        for run in tl.static_range(32 // BITS):
            begin = step * K + run * WORDS
            if run * WORDS % UNIT == 0:
                group = begin // GROUP * n + column + j
                factor, shift = _factors(scale, group, real_n, ZERO, OFFSET, BITS)
            weight = _run(words, factor, shift, run, BITS).to(x.dtype.element_ty)
            part = _columns(x, row, real_m, begin, k, WORDS)
            if TURN:
                total = tl.dot(weight, tl.trans(part), total, input_precision="ieee")
            else:
                total = tl.dot(part, tl.trans(weight), total, input_precision="ieee")
    return total


@triton.jit
def _multiply(
    x, values, scale, bias, residual, out, counts, rows, n, k, steps, experts, weight_size, scale_size,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr, EXPERTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, TURN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a tile (M, N) of one split. EXPERTS: power of two of at least the experts; 0: one weight.

    WORDS: words of an output in a step; 0: the weight is not in words. UNIT: columns of a step that share a
    scale. TURN: compute the tile (N, M): a Hopper GPU then keeps values in registers, and not rows of x. With
    64 rows it would otherwise move values through shared memory, with 33 barriers in a step.
    """
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
    total = tl.zeros((N, M) if TURN else (M, N), tl.float32)
    # With its number of stages given, Triton also loads small numbers ahead.
    for step in tl.range(split * span, tl.minimum(split * span + span, steps), num_stages=STAGES):
        total = _add_step(
            total, x, values, scale, row, real_m, column, j, real_n, step, n, k,
            BITS, GROUP, UNIT, OFFSET, ZERO, K, WORDS, TURN,
        )  # fmt: skip
    if TURN:
        total = tl.trans(total)
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
    x, values, scale, column, real, n, k, steps,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Multiply one row by some columns of a weight: sums (N,) float32. column: (N,), their numbers."""
    total = tl.zeros((N, WORDS if WORDS > 0 else K), tl.float32)
    for step in range(steps):
        if BITS == 0:
            at = step * K + tl.arange(0, K)
            mask = real[:, None] & (at < k)[None, :]
            weight = tl.load(values + column[:, None] * k + at[None, :], mask=mask, other=0.0)
            weight = weight.to(x.dtype.element_ty).to(tl.float32)
            total += weight * tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)[None, :]
        elif WORDS == 0:
            at = step * K + tl.arange(0, K)
            place = (step * n + column)[:, None] * K + tl.arange(0, K)[None, :]
            levels = tl.load(values + place, mask=real[:, None], other=0).to(tl.float32)
            group = step * K // GROUP * n + column
            factor = tl.load(scale + group, mask=real, other=0.0).to(tl.float32)[:, None]
            part = tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)[None, :]
            total += levels * part * factor
        else:
            place = (step * n + column)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
            words = tl.load(values + place, mask=real[:, None], other=0)
            for run in tl.static_range(32 // BITS):
                begin = step * K + run * WORDS
                if run * WORDS % UNIT == 0:
                    group = begin // GROUP * n + column
                    factor, shift = _factors(scale, group, real, ZERO, OFFSET, BITS)
                at = begin + tl.arange(0, WORDS)
                part = tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)[None, :]
                total += _run(words, factor, shift, run, BITS) * part
    sums = tl.sum(total, axis=1)
    if ROW_SCALE:
        sums *= tl.load(scale + column, mask=real, other=0.0)
    return sums


@triton.jit
def _chosen(
    x, values, scale, chosen, out, places, n, k, steps, weight_size, scale_size, width,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr, KIND: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of one row and one of its experts. KIND: a gated activation; -1: none."""
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(chosen + pair).to(tl.int64)
    x += pair // places * k
    values += expert * weight_size
    scale += expert * scale_size
    column = tl.program_id(1).to(tl.int64) * N + tl.arange(0, N)
    real = column < width
    sums = _row_sums(
        x, values, scale, column, real, n, k, steps, BITS, GROUP, UNIT, OFFSET, ZERO, ROW_SCALE, N, K, WORDS
    )
    if KIND >= 0:
        up = _row_sums(
            x, values, scale, column + width, real, n, k, steps,
            BITS, GROUP, UNIT, OFFSET, ZERO, ROW_SCALE, N, K, WORDS,
        )  # fmt: skip
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
    values, scale, out, n, k, first, last,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Turn a step of N outputs into plain numbers. out: (last - first, k)."""
    step, row = tl.program_id(0), tl.program_id(1) * N + tl.arange(0, N)
    real = first + row < last
    column, row = first + row, row.to(tl.int64)
    start = step.to(tl.int64) * n + column
    if WORDS == 0:
        at = start[:, None] * K + tl.arange(0, K)[None, :]
        levels = tl.load(values + at, mask=real[:, None], other=0).to(tl.float32)
        group = step * K // GROUP * n + column
        factor = tl.load(scale + group, mask=real, other=0.0).to(tl.float32)[:, None]
        _store_columns(out, row, real, step * K, k, levels * factor, K)
    else:
        at = start[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        words = tl.load(values + at, mask=real[:, None], other=0)
        for run in tl.static_range(32 // BITS):
            begin = step * K + run * WORDS
            if run * WORDS % UNIT == 0:
                group = begin // GROUP * n + column
                factor, shift = _factors(scale, group, real, ZERO, OFFSET, BITS)
            _store_columns(out, row, real, begin, k, _run(words, factor, shift, run, BITS), WORDS)


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
    side = 128 if m > 32 and not weight.bits else 64  # so that older GPUs have enough shared memory
    tiles, columns = -(-rows // m) + used - 1, -(-n // side)
    steps = -(-weight.k // weight.width)
    count = splits(tiles * columns, m, steps, processors) if counts is None else 1
    target = out if count == 1 else x.new_empty((count, rows, n), dtype=torch.float32)
    added = (None, None) if count > 1 else (bias, residual)
    _multiply[(tiles, columns, count)](
        x, weight.values, x if weight.scale is None else weight.scale,
        *(x if part is None else part for part in added), target,
        x if counts is None else counts, rows, n, weight.k, steps, experts, *_sizes(weight),
        **_scheme(weight), EXPERTS=0 if counts is None else next_power(experts), BIAS=added[0] is not None,
        RESIDUAL=added[1] is not None, M=m, N=side, K=weight.width, TURN=weight.words and m > 32,
        STAGES=3 if m > 32 else 4, num_warps=8 if m > 32 and not weight.words else 4,
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
    step = weight.width if weight.bits else CHOSEN_STEP
    _chosen[(rows * places, -(-width // CHOSEN_TILE))](
        x, weight.values, x if weight.scale is None else weight.scale, chosen, out, places, weight.n,
        weight.k, -(-weight.k // step), *_sizes(weight), width, **_scheme(weight),
        KIND=-1 if activation is None else ACTIVATIONS[activation], N=CHOSEN_TILE, K=step,
    )  # fmt: skip
    return out


def _sizes(weight: Weight) -> tuple[int, int]:
    """Return how many numbers the values and the scales of one expert have."""
    return weight.values[0].numel(), 0 if weight.scale is None else weight.scale[0].numel()


def _scheme(weight: Weight) -> dict[str, object]:
    """Return the constants of the kernels that depend on how a weight is packed."""
    return {
        "BITS": weight.bits,
        "GROUP": weight.group,
        "UNIT": math.gcd(weight.group, weight.width),
        "OFFSET": weight.offset,
        "ZERO": weight.zero,
        "ROW_SCALE": weight.scale is not None and not weight.bits,
        "WORDS": WORDS if weight.words else 0,
    }


def splits(tiles: int, m: int, steps: int, processors: int) -> int:
    """Return into how many parts k is cut: a power of two, so that few variants are compiled.

    Splits of many rows are large, because each split writes its sums in float32.

    tiles: tiles of outputs. m: rows of a tile. steps: steps over k.
    """
    wanted = min(PROGRAMS * processors * 16 // (m * tiles), MAX_SPLITS, steps)
    return next_power(wanted + 1) // 2 if wanted > 1 else 1


def unpack(weight: Weight, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Return the outputs first..last-1 of a weight of codes as plain numbers, (last - first, k)."""
    assert weight.scale is not None
    out = torch.empty((last - first, weight.k), dtype=dtype, device=weight.values.device)
    scheme = _scheme(weight)
    del scheme["ROW_SCALE"]
    _unpack[(weight.values.shape[1], -(-(last - first) // 64))](
        weight.values, weight.scale, out, weight.n, weight.k, first, last, **scheme, N=64, K=weight.width
    )
    return out


def round_input(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows (n, k) to float8_e4m3fn, padded with zeros to a multiple of STEP. One launch.

    Returns them and their scales, (n, 1) float32. Its twin is `float8.round_padded`.
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
