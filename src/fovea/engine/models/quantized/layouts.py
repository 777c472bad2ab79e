"""Weights whose levels are evenly spaced, and weights of small floats with scales for blocks of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fovea.core.errors import CheckpointError
from fovea.engine.models.quantized.base import PLAIN_TYPES, Fault, Part, Read, Rows, Weight, checked, small
from fovea.engine.models.targets import Shape
from fovea.kernels.codes import Codes

UNEVEN = "their levels are not evenly spaced"


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the codes of `bits` bits in each row of int32 words, lowest bits first.

    words: (rows, words). Returns (rows, words * 32 / bits) uint8. bits: 2, 4 or 8.
    """
    # A contiguous tensor of one column may have any stride, so it becomes a list first.
    data = words.reshape(-1).view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return data
    # A byte is widened to as many bytes as it has codes, and each code is shifted to a byte of its own.
    wide = data.to(torch.int16 if bits == 4 else torch.int32)
    if bits == 2:
        wide = wide.bitwise_or_(wide << 12).bitwise_and_(0x000F000F)
        wide = wide.bitwise_or_(wide << 6).bitwise_and_(0x03030303)
    else:
        wide = wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F)
    return wide.view(torch.uint8)


def table_values(table: Tensor, indices: Tensor) -> Tensor:
    """Return the levels of a table, (levels,) or (levels, values), that uint8 indices name.

    index_select is several times as fast as other ways to index. Several values of a level become one number
    meanwhile.
    """
    flat = indices.reshape(-1).int()
    if table.ndim == 1:
        return table.index_select(0, flat).view(indices.shape)
    pairs = table.contiguous().view(torch.float64).view(-1)
    return pairs.index_select(0, flat).view(torch.float32).view(*indices.shape[:-1], -1)


def pair_table(levels: Tensor, *, low_first: bool) -> Tensor:
    """Return the two levels that each byte names, (256, 2). levels: (16,) float32.

    low_first: the low half of a byte names the first one.
    """
    codes = torch.arange(256)
    pair = levels[codes & 15], levels[codes >> 4]
    return torch.stack(pair if low_first else pair[::-1], dim=-1)


def scale_groups(values: Tensor, scale: Tensor, group: int) -> Tensor:
    """Multiply values (rows, k) in place by scales (rows, groups) of `group` consecutive columns each."""
    rows, k = values.shape
    if k % group == 0:
        values.view(rows, -1, group).mul_(scale[:, :, None])
    else:
        values.mul_(scale.repeat_interleave(group, dim=1)[:, :k])
    return values


@dataclass(frozen=True, slots=True)
class Levels:
    """Evenly spaced levels of a weight (n, k): value = scale * (code - zero).

    codes: (n, k) uint8.
    scale: (n, groups) float32.
    zero: one code for all groups, or (n, groups) uint8.
    """

    codes: Tensor
    scale: Tensor
    zero: int | Tensor


class EvenWeight(Weight):
    """A weight (n, k) with evenly spaced levels, in groups of columns.

    bits: bits of a code.
    group: columns of a group.
    columns: (k,) the group of each column; None: groups are consecutive.
    unpack: reads and unpacks its tensors.
    """

    def __init__(
        self,
        shape: Shape,
        parts: Sequence[Part],
        bits: int,
        group: int,
        unpack: Callable[[Read], Levels],
        columns: Tensor | None = None,
    ) -> None:
        k = shape[1]
        per = f"in groups of {group}" if group < k else "with a scale per row"
        reason = "" if columns is None else "their groups are not consecutive columns (act-order)"
        super().__init__(shape, parts, coded="" if reason else f"{bits} bits {per}", reason=reason)
        self._bits, self._group, self._unpack, self._columns = bits, min(group, k), unpack, columns

    def load(self, read: Read) -> Codes | Rows:
        levels = self._unpack(read)
        zero = levels.zero
        if isinstance(zero, Tensor) and bool((zero == zero.view(-1)[0]).all()):
            zero = int(zero.view(-1)[0])
        if self._columns is None:
            return Codes(levels.codes, self._bits, self._group, levels.scale, zero)
        columns = self._columns

        def rows(rows: slice) -> Tensor:
            values = levels.codes[rows].float()
            zeros = zero[rows].float().index_select(1, columns) if isinstance(zero, Tensor) else zero
            return values.sub_(zeros).mul_(levels.scale[rows].index_select(1, columns))

        return rows


def group_columns(part: Part | None, k: int, group: int, groups: int, read: Read) -> Tensor | None:
    """Return the group of each column, or None if groups are consecutive.

    part: the tensor that stores them; None: there is none.
    Raises Fault if it names groups that have no scales.
    """
    if part is None:
        return None
    columns = small(checked(part, ("I32", "I64"), (k,)), read).long()
    if bool((columns == torch.arange(k) // group).all()) or bool((columns == -1).all()):
        return None
    if int(columns.min()) < 0 or int(columns.max()) >= groups:
        raise Fault(part.name, f"names groups beyond those of the scales; accepted: 0 to {groups - 1}")
    return columns


FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The number that each byte is as a float of 8 bits (E4M3)."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_PAIRS = pair_table(torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)]), low_first=True)
"""The two floats of 4 bits (E2M1, OCP Microscaling Formats 1.0) in each byte, the first in its low half."""


class GridWeight(Weight):
    """A weight (n, k) or (experts, n, k) of small floats, with a scale for each block of the matrix.

    numbers: reads the numbers, one row after the other: (experts * n, k) of E4M3 or, for floats of 4 bits,
        (experts * n, k / 2) uint8.
    scales: reads the scales, (experts * blocks, blocks) float32.
    block: rows and columns of a block.
    """

    def __init__(
        self,
        shape: Shape,
        parts: Sequence[Part],
        block: tuple[int, int],
        numbers: Callable[[Read], Tensor],
        scales: Callable[[Read], Tensor],
    ) -> None:
        super().__init__(shape, parts, reason=UNEVEN)
        self._block, self._numbers, self._scales = block, numbers, scales

    def load(self, read: Read) -> Rows:
        numbers, grid = self._numbers(read), self._scales(read)
        n, k = self.shape[-2:]
        table = FP4_PAIRS if numbers.dtype is torch.uint8 else FP8
        height, width = self._block
        per_matrix = -(-n // height)

        def rows(rows: slice) -> Tensor:
            places = torch.arange(rows.start, rows.stop)
            scale = grid[places // n * per_matrix + places % n // height]
            values = table_values(table, numbers[rows].view(torch.uint8))
            return scale_groups(values, scale, min(width, k))

        return rows


def grid_scales(
    part: Part, shape: Shape, block: tuple[int, int] | None, types: Sequence[str] = PLAIN_TYPES
) -> tuple[tuple[int, int], Callable[[Read], Tensor]]:
    """Return the block of a scale, and what reads the scales of all blocks, (experts * blocks, blocks).

    A scale may belong to the tensor, to each row, or to each block.

    shape: of the weight.
    block: rows and columns of a block; None: there is one scale per tensor or per row.
    Raises Fault for another shape.
    """
    *experts, n, k = shape
    one: list[Shape] = [(), (1,), (1, 1)] if not experts else [(*experts,), (*experts, 1), (*experts, 1, 1)]
    if block is None:
        per_row: list[Shape] = [(*experts, n, 1)] if experts else [(n, 1), (n,)]
        checked(part, types, *one, *per_row)
        block = (n, k) if part.shape in one else (1, k)
    else:
        checked(part, types, (*experts, -(-n // block[0]), -(-k // block[1])))
    count = prod(experts) * -(-n // block[0])
    return block, lambda read: scale_values(part, read).view(count, -1)


def scale_values(part: Part, read: Read) -> Tensor:
    """Read scales as float32. uint8 are exponents of 2 with a bias of 127 (E8M0). Raises CheckpointError."""
    stored = read(part)
    scale = stored.float()
    if stored.dtype is torch.uint8:
        exponents = stored.int()
        # The bits of a float32; the exponent 0 is that of numbers without a leading one.
        scale = torch.where(exponents > 0, exponents << 23, 1 << 22).int().view(torch.float32)
    if not bool(scale.isfinite().all()):
        raise CheckpointError(f"{part.name[:300]} has scales that are not finite")
    return scale
