"""Turns the blocks of GGUF's types into codes and values.

A block is a run of values of one row, with its scales. The layouts are those of ggml. For the types whose
levels are evenly spaced, `decode` gives `Codes` without loss. IQ4_NL and IQ4_XS take their levels from a table,
and have values only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fovea.kernels.codes import Codes

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The sixteen levels of IQ4_NL and IQ4_XS."""
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that are not quantized."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the codes of a type are packed.

    bits, group, zero: see `Codes`.
    unpack: from blocks (rows, blocks, bytes) uint8 to the fields of `Codes` that are tensors. Its first two
        dimensions are those of the blocks.
    superblock: groups that share an outer scale; 0: there is none.
    """

    bits: int
    group: int
    zero: int
    unpack: Callable[[Tensor], dict[str, Tensor]]
    superblock: int = 0


def decode(kind: str, blocks: Tensor) -> Codes:
    """Return the codes of rows.

    kind: name of the type, one of LAYOUTS.
    blocks: (rows, blocks of a row, bytes of a block) uint8.
    """
    layout = LAYOUTS[kind]
    fields: dict[str, Any] = {name: tensor.flatten(1) for name, tensor in layout.unpack(blocks).items()}
    return Codes(
        **fields,
        bits=layout.bits,
        group=layout.group,
        zero=layout.zero,
        outer_groups=layout.superblock or 1,
    )


def values(kind: str, blocks: Tensor) -> Tensor:
    """Return the values of rows, (rows, values of a row): float32, or the type of values that are floats.

    kind, blocks: see `decode`; any type.
    """
    if kind in FLOATS:
        return blocks.flatten(1).view(FLOATS[kind])
    if kind in LAYOUTS:
        return decode(kind, blocks).values()
    codes, scale = _iq4_nl(blocks) if kind == "IQ4_NL" else _iq4_xs(blocks)
    levels = torch.tensor(IQ4_LEVELS, dtype=torch.float32)[codes.long()]
    return (scale.unsqueeze(-1) * levels).flatten(1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a place of each block, as float32: (rows, blocks, 1)."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Split bytes (..., n) into (..., 2 n) numbers: of every `run` bytes first the low halves, then the high."""
    runs = packed.unflatten(-1, (-1, run))
    return torch.cat((runs & 15, runs >> 4), dim=-1).flatten(-2)


def _bits(packed: Tensor, width: int) -> Tensor:
    """Split bytes (..., n) into (..., 8 / width, n): number i has the bits from i * width on."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return packed.unsqueeze(-2) >> shifts.unsqueeze(-1) & (1 << width) - 1


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """The 32 bits from a byte on: (rows, blocks, 32), each 0 or 16."""
    return _bits(blocks[..., start : start + 4], 1).transpose(-1, -2).flatten(-2) << 4


def _q4_0(blocks: Tensor) -> dict[str, Tensor]:
    return {"codes": _nibbles(blocks[..., 2:], 16), "scale": _half(blocks, 0)}


def _q4_1(blocks: Tensor) -> dict[str, Tensor]:
    return {
        "codes": _nibbles(blocks[..., 4:], 16),
        "scale": _half(blocks, 0),
        "minimum": _half(blocks, 2),
    }


def _q5_0(blocks: Tensor) -> dict[str, Tensor]:
    return {"codes": _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks, 2), "scale": _half(blocks, 0)}


def _q5_1(blocks: Tensor) -> dict[str, Tensor]:
    return {
        "codes": _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks, 4),
        "scale": _half(blocks, 0),
        "minimum": _half(blocks, 2),
    }


def _q8_0(blocks: Tensor) -> dict[str, Tensor]:
    # A signed byte plus 128 is the same byte with its highest bit flipped.
    return {"codes": blocks[..., 2:] ^ 128, "scale": _half(blocks, 0)}


def _low_bits(packed: Tensor) -> Tensor:
    """The 256 numbers of two bits of Q2_K and Q3_K: of every 32 bytes first the lowest bits of each, and so on."""
    return _bits(packed.unflatten(-1, (2, 32)), 2).flatten(-3)


def _q2_k(blocks: Tensor) -> dict[str, Tensor]:
    scales = blocks[..., :16]
    return {
        "codes": _low_bits(blocks[..., 16:80]),
        "scale": (scales & 15).float(),
        "minimum": (scales >> 4).float(),
        "outer": _half(blocks, 80),
        "outer_minimum": -_half(blocks, 82),
    }


def _q3_k(blocks: Tensor) -> dict[str, Tensor]:
    high = _bits(blocks[..., :32], 1).flatten(-2) << 2
    packed = blocks[..., 96:108]
    low = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), dim=-1)
    scale = low | _bits(packed[..., 8:], 2).flatten(-2) << 4
    return {
        "codes": _low_bits(blocks[..., 32:96]) | high,
        "scale": scale.float() - 32,
        "outer": _half(blocks, 108),
    }


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and minima of six bits that Q4_K and Q5_K pack into twelve bytes."""
    first, second, mixed = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = torch.cat((first & 63, mixed & 15 | first >> 6 << 4), dim=-1)
    minimum = torch.cat((second & 63, mixed >> 4 | second >> 6 << 4), dim=-1)
    return scale.float(), minimum.float()


def _q4_k(blocks: Tensor) -> dict[str, Tensor]:
    scale, minimum = _k_scales(blocks[..., 4:16])
    return {
        "codes": _nibbles(blocks[..., 16:], 32),
        "scale": scale,
        "minimum": minimum,
        "outer": _half(blocks, 0),
        "outer_minimum": -_half(blocks, 2),
    }


def _q5_k(blocks: Tensor) -> dict[str, Tensor]:
    scale, minimum = _k_scales(blocks[..., 4:16])
    high = _bits(blocks[..., 16:48], 1).flatten(-2) << 4
    return {
        "codes": _nibbles(blocks[..., 48:], 32) | high,
        "scale": scale,
        "minimum": minimum,
        "outer": _half(blocks, 0),
        "outer_minimum": -_half(blocks, 2),
    }


def _q6_k(blocks: Tensor) -> dict[str, Tensor]:
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3) << 4
    return {
        "codes": _nibbles(blocks[..., :128], 64) | high,
        "scale": blocks[..., 192:208].contiguous().view(torch.int8).float(),
        "outer": _half(blocks, 208),
    }


def _iq4_nl(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of levels (rows, groups, 32), and the scale of each group (rows, groups)."""
    return _nibbles(blocks[..., 2:], 16), _half(blocks, 0).flatten(1)


def _iq4_xs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """See `_iq4_nl`. Eight groups share a float16; each has a scale of six bits."""
    low = _bits(blocks[..., 4:8], 4).transpose(-1, -2).flatten(-2)
    high = _bits(blocks[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    scale = _half(blocks, 0) * ((low | high << 4).float() - 32)
    return _nibbles(blocks[..., 8:], 16).unflatten(-1, (8, 32)).flatten(1, 2), scale.flatten(1)


LAYOUTS: Mapping[str, Layout] = {
    "Q4_0": Layout(4, 32, 8, _q4_0),
    "Q4_1": Layout(4, 32, 0, _q4_1),
    "Q5_0": Layout(5, 32, 16, _q5_0),
    "Q5_1": Layout(5, 32, 0, _q5_1),
    "Q8_0": Layout(8, 32, 128, _q8_0),
    "Q2_K": Layout(2, 16, 0, _q2_k, 16),
    "Q3_K": Layout(3, 16, 4, _q3_k, 16),
    "Q4_K": Layout(4, 32, 0, _q4_k, 8),
    "Q5_K": Layout(5, 32, 0, _q5_k, 8),
    "Q6_K": Layout(6, 16, 32, _q6_k, 16),
}
"""The types that have codes, by name."""
