"""Turns the blocks of GGUF's types into codes and values.

A block is a run of values of one row, with its scales. The layouts are those of ggml. For the types whose
levels are evenly spaced, `unpack` gives the fields of `Codes` without loss. IQ4_NL and IQ4_XS take their
levels from a table, and have values only.

This is numpy and not torch: each call runs on one thread, and `weights` makes many of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Fields = dict[str, NDArray[Any]]

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The sixteen levels of IQ4_NL and IQ4_XS."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types that are not quantized."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the codes of a type are packed.

    bits, group, zero: see `Codes`.
    unpack: from blocks (rows, blocks of a row, bytes) to the arrays of `Codes` by field, whose first two
        dimensions are those of the blocks.
    outer_groups: see `Codes`.
    """

    bits: int
    group: int
    zero: int
    unpack: Callable[[Bytes], Fields]
    outer_groups: int = 1


def unpack(kind: str, blocks: Bytes) -> Fields:
    """Return the arrays of the codes of rows by their field in `Codes`, each (rows, ...).

    kind: name of the type, one of LAYOUTS.
    blocks: (rows, blocks of a row, bytes of a block).
    """
    return {name: array.reshape(len(blocks), -1) for name, array in LAYOUTS[kind].unpack(blocks).items()}


def values(kind: str, blocks: Bytes) -> NDArray[np.float32]:
    """Return the values of rows, (rows, values of a row).

    kind: name of a quantized type.
    blocks: see `unpack`.
    """
    if kind not in LAYOUTS:
        numbers, scale = _iq4_nl(blocks) if kind == "IQ4_NL" else _iq4_xs(blocks)
        levels = np.array(IQ4_LEVELS, np.float32)[numbers]
        return (levels * scale[..., None]).reshape(len(blocks), -1)
    layout, fields = LAYOUTS[kind], unpack(kind, blocks)
    scale, minimum = fields["scale"], fields.get("minimum")
    if "outer" in fields:
        scale = scale * np.repeat(fields["outer"], layout.outer_groups, axis=1)
    if minimum is not None and "outer_minimum" in fields:
        minimum = minimum * np.repeat(fields["outer_minimum"], layout.outer_groups, axis=1)
    result = fields["codes"].reshape(len(blocks), -1, layout.group).astype(np.float32)
    result -= np.float32(layout.zero)
    result *= scale[..., None]
    if minimum is not None:
        result += minimum[..., None]
    return result.reshape(len(blocks), -1)


def _half(blocks: Bytes, start: int) -> NDArray[np.float32]:
    """Return the float16 at a place of each block, (rows, blocks, 1)."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Split bytes (..., n) into (..., 2 n) numbers: the low halves of `run` bytes, then their high ones."""
    runs = np.ascontiguousarray(packed).reshape(*packed.shape[:-1], -1, run)
    halves = np.empty((*runs.shape[:-1], 2, run), np.uint8)
    halves[..., 0, :] = runs & 15
    halves[..., 1, :] = runs >> 4
    return halves.reshape(*packed.shape[:-1], -1)


def _bits(packed: Bytes, width: int) -> Bytes:
    """Split bytes (..., n) into (..., 8 / width, n): row i has the `width` bits from i * width on."""
    packed = np.ascontiguousarray(packed)
    split = np.empty((*packed.shape[:-1], 8 // width, packed.shape[-1]), np.uint8)
    for row in range(8 // width):
        split[..., row, :] = packed >> row * width & (1 << width) - 1
    return split


def _flat(array: Bytes, axes: int) -> Bytes:
    """Join the last axes of an array."""
    return array.reshape(*array.shape[:-axes], -1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """Return the 32 bits from a byte on, (rows, blocks, 32), each 0 or 16."""
    bits = _flat(_bits(blocks[..., start : start + 4], 1).swapaxes(-1, -2), 2)
    bits <<= 4
    return bits


def _q4_0(blocks: Bytes) -> Fields:
    return {"codes": _nibbles(blocks[..., 2:], 16), "scale": _half(blocks, 0)}


def _q4_1(blocks: Bytes) -> Fields:
    return {"codes": _nibbles(blocks[..., 4:], 16), "scale": _half(blocks, 0), "minimum": _half(blocks, 2)}


def _q5_0(blocks: Bytes) -> Fields:
    return {"codes": _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks, 2), "scale": _half(blocks, 0)}


def _q5_1(blocks: Bytes) -> Fields:
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks, 4)
    return {"codes": codes, "scale": _half(blocks, 0), "minimum": _half(blocks, 2)}


def _q8_0(blocks: Bytes) -> Fields:
    # A signed byte plus 128 is the same byte with its highest bit flipped.
    return {"codes": blocks[..., 2:] ^ 128, "scale": _half(blocks, 0)}


def _pairs(packed: Bytes) -> Bytes:
    """Return the 256 numbers of two bits of Q2_K and Q3_K: of 32 bytes first the lowest bits of each."""
    return _flat(_bits(packed.reshape(*packed.shape[:-1], 2, 32), 2), 3)


def _q2_k(blocks: Bytes) -> Fields:
    scales = blocks[..., :16]
    return {
        "codes": _pairs(blocks[..., 16:80]),
        "scale": (scales & 15).astype(np.float32),
        "minimum": (scales >> 4).astype(np.float32),
        "outer": _half(blocks, 80),
        "outer_minimum": -_half(blocks, 82),
    }


def _q3_k(blocks: Bytes) -> Fields:
    packed = blocks[..., 96:108]
    low = np.concatenate((packed[..., :8] & 15, packed[..., :8] >> 4), axis=-1)
    scale = low | _flat(_bits(packed[..., 8:], 2), 2) << 4
    return {
        "codes": _pairs(blocks[..., 32:96]) | _flat(_bits(blocks[..., :32], 1), 2) << 2,
        "scale": scale.astype(np.float32) - 32,
        "outer": _half(blocks, 108),
    }


def _k_scales(packed: Bytes) -> Fields:
    """Return the eight scales and minima of six bits that Q4_K and Q5_K pack into twelve bytes."""
    first, second, mixed = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate((first & 63, mixed & 15 | first >> 6 << 4), axis=-1)
    minimum = np.concatenate((second & 63, mixed >> 4 | second >> 6 << 4), axis=-1)
    return {"scale": scale.astype(np.float32), "minimum": minimum.astype(np.float32)}


def _q4_k(blocks: Bytes) -> Fields:
    return {
        "codes": _nibbles(blocks[..., 16:], 32),
        **_k_scales(blocks[..., 4:16]),
        "outer": _half(blocks, 0),
        "outer_minimum": -_half(blocks, 2),
    }


def _q5_k(blocks: Bytes) -> Fields:
    return {
        "codes": _nibbles(blocks[..., 48:], 32) | _flat(_bits(blocks[..., 16:48], 1), 2) << 4,
        **_k_scales(blocks[..., 4:16]),
        "outer": _half(blocks, 0),
        "outer_minimum": -_half(blocks, 2),
    }


def _q6_k(blocks: Bytes) -> Fields:
    scale = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    codes = _nibbles(blocks[..., :128], 64) | _pairs(blocks[..., 128:192]) << 4
    return {"codes": codes, "scale": scale, "outer": _half(blocks, 208)}


def _iq4_nl(blocks: Bytes) -> tuple[Bytes, NDArray[np.float32]]:
    """Return the numbers of levels (rows, groups, 32), and the scale of each group (rows, groups)."""
    return _nibbles(blocks[..., 2:], 16), _half(blocks, 0)[..., 0]


def _iq4_xs(blocks: Bytes) -> tuple[Bytes, NDArray[np.float32]]:
    """See `_iq4_nl`. Eight groups share a float16; each has a scale of six bits."""
    low = _flat(_bits(blocks[..., 4:8], 4).swapaxes(-1, -2), 2)
    high = _flat(_bits(blocks[..., 2:4], 2).swapaxes(-1, -2), 2)
    scale = _half(blocks, 0) * ((low | high << 4).astype(np.float32) - 32)
    rows = len(blocks)
    return _nibbles(blocks[..., 8:], 16).reshape(rows, -1, 32), scale.reshape(rows, -1)


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
