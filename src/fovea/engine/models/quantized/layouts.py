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
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    codes = torch.empty(*data.shape, 8 // bits, dtype=torch.uint8)
    for place in range(8 // bits):
        torch.bitwise_right_shift(data, place * bits, out=codes[..., place])
    return codes.bitwise_and_((1 << bits) - 1).flatten(-2)


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
            zeros = zero[rows].float()[:, columns] if isinstance(zero, Tensor) else zero
            return (levels.codes[rows].float() - zeros) * levels.scale[rows][:, columns]

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


class GridWeight(Weight):
    """A weight (n, k) or (experts, n, k) of small floats, with a scale for each block of the matrix.

    numbers: reads the numbers, one row after the other: (experts * n, k) of any type or, for floats of 4
        bits, (experts * n, k / 2) uint8.
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
        height, width = self._block
        per_matrix = -(-n // height)

        def rows(rows: slice) -> Tensor:
            places = torch.arange(rows.start, rows.stop)
            scale = grid[places // n * per_matrix + places % n // height]
            values = numbers[rows]
            values = fp4_values(values) if values.dtype is torch.uint8 else values.float()
            if grid.shape[1] == 1:
                return values * scale
            return values * scale.repeat_interleave(width, dim=1)[:, :k]

        return rows


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of floats with 2 bits of exponent and 1 of mantissa (E2M1, OCP Microscaling Formats 1.0)."""


def fp4_values(pairs: Tensor) -> Tensor:
    """Return the values of pairs of E2M1 floats, (n, k / 2) to (n, k). The first is in the low half."""
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    both = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
    return table[both.int()]


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
