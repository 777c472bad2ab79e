"""Checkpoints in the formats of AWQ (arXiv 2306.00978) and GPTQ (arXiv 2210.17323).

Both store codes in int32 words (`qweight`), zero points in such words (`qzeros`), and float scales. Their
matrices are transposed: the axis of the inputs comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fovea.core.errors import CheckpointError
from fovea.engine.models.quantized.base import (
    ITSELF,
    PLAIN_TYPES,
    Family,
    Fault,
    Part,
    Read,
    Settings,
    Weight,
    checked,
    matrix_shape,
    required,
)
from fovea.engine.models.quantized.layouts import (
    EvenWeight,
    Levels,
    group_columns,
    scale_values,
    unpack,
)

CODES, ZEROS, SCALES, COLUMNS = ".qweight", ".qzeros", ".scales", ".g_idx"
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds each of its eight outputs, lowest nibble first."""


def _group_size(settings: Settings) -> int:
    group = settings.whole("group_size", 128)
    if group < 1 and group != -1:
        raise CheckpointError(f"{settings.place}: group_size is {group}; accepted: -1 (a row), or at least 1")
    return group


class Awq(Family):
    """AWQ in its version "gemm": 4 bits, eight outputs of one input in a word.

    content: the configuration. place: where it stands, for errors.
    Raises CheckpointError.
    """

    endings: ClassVar[Mapping[str, str]] = dict.fromkeys((CODES, ZEROS, SCALES), ".weight")
    title = "awq"

    def __init__(self, content: Mapping[str, Any], place: str) -> None:
        settings = Settings(content, place)
        settings.word("version", "gemm", ("gemm",))
        if (bits := settings.whole("bits", content.get("w_bit", 4))) != 4:
            raise CheckpointError(f"{place}: bits is {bits}; accepted: 4")
        self._group = _group_size(settings)

    def weight(self, name: str, parts: Mapping[str, Part], read: Read) -> Weight:
        stored = checked(_only_packed(name, parts), ("I32",))
        k, words = matrix_shape(stored)
        n = 8 * words
        group = k if self._group == -1 else self._group
        groups = -(-k // group)
        scale = checked(required(parts, SCALES, name), PLAIN_TYPES, (groups, n))
        zero = parts.get(ZEROS)
        if zero is not None:
            checked(zero, ("I32",), (groups, words))

        def levels(read: Read) -> Levels:
            zeros = 8 if zero is None else unpack_awq(read(zero))
            scales = scale_values(scale, read).t().contiguous()
            return Levels(unpack_awq(read(stored)), scales, zeros)

        return EvenWeight((n, k), tuple(parts.values()), 4, group, levels)


def unpack_awq(words: Tensor) -> Tensor:
    """Return the codes of words with eight outputs each: (inputs, words) int32 to (outputs, inputs) uint8."""
    count = words.shape[1]
    data = words.t().reshape(-1).view(torch.uint8).view(count, -1, 4)
    codes = torch.empty(count, 8, words.shape[0], dtype=torch.uint8)
    for byte in range(4):
        both = data[:, :, byte].contiguous()
        torch.bitwise_and(both, 15, out=codes[:, AWQ_NIBBLES.index(2 * byte)])
        torch.bitwise_right_shift(both, 4, out=codes[:, AWQ_NIBBLES.index(2 * byte + 1)])
    return codes.flatten(0, 1)


class Gptq(Family):
    """GPTQ with 2, 4 or 8 bits.

    Version 1 stores zero points minus one; "gptq_v2" stores them as they are. The bits of a weight follow
    from the shapes of its tensors, because a configuration may make exceptions.

    content: the configuration. place: where it stands, for errors.
    Raises CheckpointError.
    """

    endings: ClassVar[Mapping[str, str]] = dict.fromkeys((CODES, ZEROS, SCALES, COLUMNS), ".weight")
    title = "gptq"

    def __init__(self, content: Mapping[str, Any], place: str) -> None:
        settings = Settings(content, place)
        bits = settings.whole("bits", 4)
        if bits not in (2, 4, 8):
            raise CheckpointError(f"{place}: bits is {bits}; accepted: 2, 4, 8")
        layout = "format" if content.get("checkpoint_format") is None else "checkpoint_format"
        self._minus_one = 1 if settings.word(layout, "gptq", ("gptq", "gptq_v2")) == "gptq" else 0
        self._bits = (2, 4, 8) if content.get("dynamic") else (bits,)
        self._group = _group_size(settings)

    def weight(self, name: str, parts: Mapping[str, Part], read: Read) -> Weight:
        stored = checked(_only_packed(name, parts), ("I32",))
        words, n = matrix_shape(stored)
        scale = checked(required(parts, SCALES, name), PLAIN_TYPES)
        groups, _ = matrix_shape(scale)
        index = parts.get(COLUMNS)
        if index is not None and len(index.shape) != 1:
            raise Fault(index.name, f"has shape {str(list(index.shape))[:100]}; accepted: one axis")
        bits = next((b for b in self._bits if index is None or index.shape[0] == words * 32 // b), None)
        if bits is None:
            accepted = ", ".join(str(words * 32 // b) for b in self._bits)
            raise Fault(name, f"has {index and index.shape[0]} inputs in its g_idx; accepted: {accepted}")
        k = words * 32 // bits
        group = k if self._group == -1 else self._group
        checked(scale, PLAIN_TYPES, (-(-k // group), n))
        zero = checked(required(parts, ZEROS, name), ("I32",), (groups, n * bits // 32))
        if n * bits % 32:
            raise Fault(name, f"has {n} outputs of {bits} bits; accepted: multiples of {32 // bits}")
        shift, top = self._minus_one, (1 << bits) - 1

        def levels(read: Read) -> Levels:
            # A zero point of 0, minus one, is stored as the highest code.
            zeros = (unpack(read(zero), bits) + shift).bitwise_and_(top).t().contiguous()
            scales = scale_values(scale, read).t().contiguous()
            return Levels(unpack(read(stored).t(), bits), scales, zeros)

        where = group_columns(index, k, group, groups, read)
        return EvenWeight((n, k), tuple(parts.values()), bits, group, levels, where)


def _only_packed(name: str, parts: Mapping[str, Part]) -> Part:
    """Return the tensor of the codes. Raises Fault if there is a plain weight, too."""
    if ITSELF in parts:
        raise Fault(name, "is there twice: plain, and as codes and scales")
    return required(parts, CODES, name)
