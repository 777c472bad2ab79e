"""Checkpoints of bitsandbytes: NF4 and FP4 (QLoRA, arXiv 2305.14314), and LLM.int8 (arXiv 2208.07339)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from fovea.core.errors import CheckpointError
from fovea.engine.models.quantized.base import (
    ITSELF,
    Family,
    Fault,
    Part,
    Read,
    Rows,
    Settings,
    Weight,
    checked,
    matrix_shape,
    required,
    small,
)
from fovea.engine.models.quantized.layouts import (
    UNEVEN,
    EvenWeight,
    Levels,
    pair_table,
    scale_groups,
    scale_values,
    table_values,
)

STATE = ".weight.quant_state.bitsandbytes__"
ABSMAX, TABLE = ".weight.absmax", ".weight.quant_map"
NESTED_ABSMAX, NESTED_TABLE = ".weight.nested_absmax", ".weight.nested_quant_map"
ROWS = ".SCB"
MOST_BLOCK = 4096
"""Most values of a block; bitsandbytes has blocks of 64 to 4,096."""


class BitsAndBytes(Family):
    """The method "bitsandbytes".

    content: the configuration. place: where it stands, for errors.
    Raises CheckpointError.
    """

    endings: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (STATE + "nf4", STATE + "fp4", NESTED_ABSMAX, NESTED_TABLE, ABSMAX, TABLE, ROWS, ".weight_format"),
        ".weight",
    )
    unused = (".weight_format",)

    def __init__(self, content: Mapping[str, Any], place: str) -> None:
        eight = content.get("load_in_8bit") is True
        if not eight and content.get("load_in_4bit") is not True:
            raise CheckpointError(f"{place}: accepted: load_in_4bit or load_in_8bit is true")
        if eight:
            self.title = "bitsandbytes int8"
            self.notes = ("columns of large activations are rounded like the others",)
        else:
            kind = Settings(content, place).word("bnb_4bit_quant_type", "fp4", ("nf4", "fp4"))
            self.title = f"bitsandbytes {kind}"
        self.wide_activations = not eight

    def weight(self, name: str, parts: Mapping[str, Part], read: Read) -> Weight:
        whole = required(parts, ITSELF, name)
        if ROWS in parts:
            return _int8(whole, parts)
        state = next((part for ending, part in parts.items() if ending.startswith(STATE)), None)
        if state is None:
            raise Fault(name, f"has type {whole.entry.dtype[:20]}, but neither SCB nor quant_state")
        return _NormalWeight(name, whole, state, parts, read)


def _int8(whole: Part, parts: Mapping[str, Part]) -> Weight:
    """Build a weight of LLM.int8: value = code * SCB / 127, with a scale per row."""
    n, k = matrix_shape(checked(whole, ("I8",)))
    scale = checked(parts[ROWS], ("F32",), (n,), (n, 1))

    def levels(read: Read) -> Levels:
        codes = read(whole).view(torch.uint8).add_(128)
        return Levels(codes, scale_values(scale, read).view(n, 1) / 127, 128)

    return EvenWeight((n, k), tuple(parts.values()), 8, k, levels)


class _NormalWeight(Weight):
    """A weight of 4-bit codes that name levels of a table, in blocks of consecutive values.

    Blocks go on from row to row. With double quantization, the largest magnitudes of the blocks are codes of
    a table, too, in blocks of their own.
    """

    def __init__(self, name: str, whole: Part, state: Part, parts: Mapping[str, Part], read: Read) -> None:
        facts = Settings(_state(state, read), state.name[:300])
        shape = facts.content.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or any(type(n) is not int or n < 1 for n in shape):
            raise Fault(state.name, f"has shape {str(shape)[:50]}; accepted: two whole numbers")
        self._block, self._nested = _positive(facts, "blocksize"), 0
        values = prod(shape)
        blocks = -(-values // self._block)
        checked(whole, ("U8", "I8", "BF16", "F16", "F32"))
        if whole.nbytes != -(-values // 2):
            raise Fault(name, f"has {whole.nbytes} bytes; accepted: {-(-values // 2)}, as quant_state says")
        absmax = required(parts, ABSMAX, name)
        checked(required(parts, TABLE, name), ("F32",), (16,))
        if NESTED_ABSMAX in parts:
            self._nested = _positive(facts, "nested_blocksize")
            offset = facts.content.get("nested_offset", 0.0)
            if type(offset) not in (int, float) or not abs(offset) < 1e30:
                raise Fault(state.name, f"has nested_offset {str(offset)[:50]}; accepted: a finite number")
            self._offset = float(offset)
            checked(absmax, ("U8",), (blocks,))
            checked(parts[NESTED_ABSMAX], ("F32",), (-(-blocks // self._nested),))
            checked(required(parts, NESTED_TABLE, name), ("F32",), (256,))
        else:
            checked(absmax, ("F32",), (blocks,))
        super().__init__((shape[0], shape[1]), tuple(parts.values()), reason=UNEVEN)
        self._whole, self._tensors = whole, dict(parts)

    def load(self, read: Read) -> Rows:
        pairs = read(self._whole).reshape(-1).view(torch.uint8)
        # The first value of a pair is in the high half of its byte.
        table = pair_table(self._floats(TABLE, read), low_first=False)
        scale, block, k = self._magnitudes(read), self._block, self.shape[1]

        def rows(rows: slice) -> Tensor:
            first, last = rows.start * k, rows.stop * k
            values = table_values(table, pairs[first // 2 : -(-last // 2)])[first % 2 :][: last - first]
            scales = scale[first // block : -(-last // block)]
            if first % block or last % block:
                return (values * scales.repeat_interleave(block)[first % block :][: last - first]).view(-1, k)
            return scale_groups(values.view(-1, block), scales[:, None], block).view(-1, k)

        return rows

    def _magnitudes(self, read: Read) -> Tensor:
        """Return the largest magnitude of each block, float32."""
        if not self._nested:
            return self._floats(ABSMAX, read)
        codes = read(self._tensors[ABSMAX])
        scale = self._floats(NESTED_ABSMAX, read).repeat_interleave(self._nested)[: len(codes)]
        return self._floats(NESTED_TABLE, read)[codes.int()] * scale + self._offset

    def _floats(self, ending: str, read: Read) -> Tensor:
        return scale_values(self._tensors[ending], read)


def _state(part: Part, read: Read) -> Mapping[str, Any]:
    """Return the JSON object that a tensor of bytes holds. Raises Fault."""
    try:
        content = json.loads(bytes(small(checked(part, ("U8",)), read).view(-1).tolist()))
    except (ValueError, RecursionError) as error:
        raise Fault(part.name, f"is not JSON: {str(error)[:100]}") from error
    if not isinstance(content, dict):
        raise Fault(part.name, "is not a JSON object")
    return content


def _positive(facts: Settings, name: str) -> int:
    value = facts.content.get(name)
    if type(value) is not int or not 1 <= value <= MOST_BLOCK:
        raise Fault(facts.place, f"has {name} {str(value)[:50]}; accepted: 1 to {MOST_BLOCK}")
    return value
