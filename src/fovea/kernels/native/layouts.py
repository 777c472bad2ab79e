"""Finds the layout of `cpu/levels.h` that holds the codes of a weight without loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fovea.kernels.codes import Codes, exactly
from fovea.kernels.quantize import INT4, INT8

ZERO32, ZERO128, EVEN8, NESTED4, NESTED6 = 3, 4, 5, 6, 7
"""Numbers of the layouts in C++, beside those of INT8 and INT4."""
BLOCK_BYTES = {
    INT8.number: (128, 128 * 64 + 128),
    INT4.number: (32, 32 * 32 + 256),
    ZERO32: (32, 32 * 32 + 192),
    ZERO128: (128, 128 * 32 + 192),
    EVEN8: (32, 32 * 64 + 128),
    NESTED4: (256, 256 * 32 + 8 * 128 + 256),
    NESTED6: (256, 256 * 64 + 16 * 128 + 256),
}
"""Values of k in a block of each layout, and bytes of a block of 64 outputs."""
CENTRE = 128
"""The code that stands for zero in layouts of 8 bits."""
NESTED_VALUES = 256


@dataclass(frozen=True, slots=True)
class Packable:
    """The codes of a weight (n, k), and its scales in the types of a layout.

    layout: number of the layout.
    codes: (n, k) uint8.
    scale: (n, groups), float16 (bfloat16 for INT8), or int8 if the layout is nested.
    offset: (n, groups): zeros uint8, or minima in the type of `scale`; None: the layout has none.
    outer, outer_offset: (n, blocks) float16, if the layout is nested.
    """

    layout: int
    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None
    outer: Tensor | None = None
    outer_offset: Tensor | None = None


def packable(codes: Codes) -> Packable | None:
    """Return the codes in the types of the layout that holds them without loss; None: there is none."""
    if codes.outer is not None:
        return _nested(codes, codes.outer)
    if codes.bits > 4:
        return _wide(codes)
    size = _group(codes)
    if codes.minimum is not None:
        scale, minimum = (exactly(part, torch.float16) for part in (codes.scale, codes.minimum))
        if scale is None or minimum is None or size % INT4.group or _has_zeros(codes):
            return None
        parts = (_spread(part, codes, INT4.group) for part in (scale, minimum))
        return Packable(INT4.number, codes.codes, *parts)
    layout, width = (ZERO128, 128) if size % 128 == 0 else (ZERO32, 32)
    scale = exactly(codes.scale, torch.float16)
    if scale is None or size % width:
        return None
    zero = codes.zero if isinstance(codes.zero, Tensor) else torch.full_like(codes.scale, codes.zero)
    return Packable(
        layout, codes.codes, _spread(scale, codes, width), _spread(zero.to(torch.uint8), codes, width)
    )


def join_packable(parts: Sequence[Packable]) -> Packable:
    """Return the rows of several weights of one layout as one weight."""
    names = [field.name for field in fields(Packable)][1:]
    columns = [[getattr(part, name) for part in parts] for name in names]
    return Packable(parts[0].layout, *map(_joined, columns))  # type: ignore[arg-type]


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)


def _wide(codes: Codes) -> Packable | None:
    """Codes of 5 to 8 bits with one zero for all groups: it is moved to CENTRE."""
    size = _group(codes)
    if codes.minimum is not None or not isinstance(codes.zero, int):
        return None
    shift = CENTRE - codes.zero
    if not 0 <= shift <= 256 - (1 << codes.bits):
        return None
    moved = codes.codes if shift == 0 else codes.codes + shift
    scale = exactly(codes.scale, torch.bfloat16)
    if scale is not None and size % INT8.group == 0:
        return Packable(INT8.number, moved, _spread(scale, codes, INT8.group))
    scale = exactly(codes.scale, torch.float16)
    if scale is not None and size % 32 == 0:
        return Packable(EVEN8, moved, _spread(scale, codes, 32))
    return None


def _nested(codes: Codes, outer: Tensor) -> Packable | None:
    """Codes of at most 6 bits whose scales are products, in blocks of 256 values."""
    layout, width = (NESTED4, 32) if codes.bits <= 4 and codes.group == 32 else (NESTED6, 16)
    if codes.bits > 6 or codes.group % width or codes.group * codes.outer_groups != NESTED_VALUES:
        return None
    minimum, outer_minimum = codes.minimum, codes.outer_minimum
    if minimum is None and isinstance(codes.zero, int):
        # scale * (code - zero) = scale * code + minimum
        minimum, outer_minimum = -codes.scale, outer * codes.zero
    elif _has_zeros(codes):
        return None
    if minimum is None or outer_minimum is None:
        return None
    inner = [exactly(part, torch.int8) for part in (codes.scale, minimum)]
    factors = [exactly(part, torch.float16) for part in (outer, outer_minimum)]
    if any(part is None for part in (*inner, *factors)):
        return None
    spread = [_spread(part, codes, width) for part in inner if part is not None]
    return Packable(layout, codes.codes, *spread, *factors)


def _has_zeros(codes: Codes) -> bool:
    return isinstance(codes.zero, Tensor) or codes.zero != 0


def _group(codes: Codes) -> int:
    """Values of k that share a scale. One scale for a whole row serves groups of any size."""
    return NESTED_VALUES if codes.scale.shape[1] == 1 else codes.group


def _spread(numbers: Tensor, codes: Codes, width: int) -> Tensor:
    """Repeat numbers of groups for the smaller groups of a layout."""
    groups = -(-codes.shape[1] // width)
    if numbers.shape[1] == 1:
        return numbers.expand(-1, groups)
    return numbers.repeat_interleave(codes.group // width, dim=1)[:, :groups]
