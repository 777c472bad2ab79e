"""Bytes of weights, keys and values, states and encoder outputs, as the engine allocates them.

n and k are the outputs and the inputs of a weight.

    plain weight (n, k)          n k itemsize
    panels of bfloat16           ceil(n / 64) k / 2 tiles of 4 times 48 bytes: 64 outputs, 12 bits per number
    int8, plain                  n (k + 2 groups): a 16-bit scale per group of 128
    int4, plain                  n (k / 2 + 4 groups): a 16-bit scale and a minimum per group of 32
    int8, int4, panels           the same with n padded to panels of 64 and k to groups
    fp8                          both sides padded to 16; a float32 scale per row
    awq, gptq                    4 bits in groups of 128, with a float16 scale and a 4-bit zero point each
    bias                         n itemsize; panels have a float32 copy, padded to panels

A gated weight in panels has 32 gates and 32 values in each of them, so both halves are padded on their own.
Numbers of a bfloat16 panel whose exponent has no code take 8 bytes more. They are few (less than 0.2%), and
depend on the values of the weights, so they are left out, as are the tables of the layouts.
"""

from __future__ import annotations

from collections.abc import Mapping

from fovea.planner.precision import FLOATS, Precision
from fovea.planner.shape import Maps, ModelShape

PANEL = 64
"""Outputs of a panel."""
PANEL_PAIR_BYTES = 192
"""Bytes of a packed panel for two columns of k: four tiles of 48."""
GROUPS = {"int8": (128, 8, 2), "int4": (32, 4, 4)}
"""Numbers of k that share a scale, bits of a number, and bytes of a group's scale and minimum."""
FOREIGN_GROUP = 128
FP8_STEP = 16
SCALE_BYTES, ROW_SCALE_BYTES = 2, 4
TIED_HEAD_PACK_SHARE = 0.15
"""Largest share of all parameters that a tied table may have for the head to be a packed copy of it."""


def weight_bytes(shape: ModelShape, precision: Precision) -> Mapping[str, int]:
    """Return the bytes of a model's parameters in memory, by part.

    The parts are those of `planner.shape.PARTS`, and "embedding": tables from which a token reads one row. A
    tied table is part of "head".
    """
    found = {
        part: sum(map_bytes(maps, _format(maps, part, precision), precision) for maps in items)
        for part, items in shape.maps.items()
    }
    if shape.tied:
        found["head"] = _tied_head(shape, precision)
    for part, numbers in shape.rest.items():
        found[part] = found.get(part, 0) + numbers * precision.itemsize
    for part, numbers in shape.exact.items():
        found[part] = found.get(part, 0) + numbers * FLOATS["float32"]
    return found


def map_bytes(maps: Maps, format: str, precision: Precision) -> int:
    """Return the bytes of equal linear maps, biases included.

    format: format of their weights, a name in `precision.FLOATS` or `precision.QUANTIZED`.
    """
    bias = 0
    if maps.bias:
        bias = maps.outputs * precision.itemsize
        if _in_panels(maps, format, precision):
            bias += FLOATS["float32"] * PANEL * _panels(maps)
    return maps.count * (_weight(maps, format, precision) + bias)


def kv_bytes_per_token(shape: ModelShape, precision: Precision) -> float:
    """Return the bytes of keys and values of one token in all layers."""
    return sum(
        layers.kv_bytes_per_token(precision.kv_itemsize(layers.head_dim)) for layers in shape.attention
    )


def state_bytes(shape: ModelShape, precision: Precision) -> int:
    """Return the bytes of the states of one sequence, which are one slot."""
    return round(shape.state_bytes(precision.itemsize))


def output_bytes(shape: ModelShape, precision: Precision, tokens: int) -> int:
    """Return the bytes of an image in the encoder-output cache.

    tokens: rows of the encoder's output, as for `planner.vision.encoder_work`.
    """
    return tokens * shape.visual_token_numbers * precision.itemsize


def _format(maps: Maps, part: str, precision: Precision) -> str:
    return precision.dtype if maps.plain else precision.format_of(part)


def _weight(maps: Maps, format: str, precision: Precision) -> int:
    """Bytes of one weight."""
    n, k = maps.outputs, maps.inputs
    if format in ("awq", "gptq"):
        groups = -(-k // FOREIGN_GROUP)
        return n * k // 2 + n * groups * SCALE_BYTES + n * groups // 2
    if format == "fp8":
        rows, columns = _padded(n, FP8_STEP), _padded(k, FP8_STEP)
        return rows * (columns + ROW_SCALE_BYTES)
    panels = _in_panels(maps, format, precision)
    if format in GROUPS:
        group, bits, scale = GROUPS[format]
        rows, groups = PANEL * _panels(maps) if panels else n, -(-k // group)
        return rows * (-(-(groups * group if panels else k) * bits // 8) + groups * scale)
    return _panels(maps) * (k // 2) * PANEL_PAIR_BYTES if panels else n * k * FLOATS[format]


def _in_panels(maps: Maps, format: str, precision: Precision) -> bool:
    """Whether a weight is stored in panels: C++ packs only weights of bfloat16, plain ones of even width."""
    if precision.storage != "panels" or precision.dtype != "bfloat16":
        return False
    return format in GROUPS or (format == "bfloat16" and maps.inputs % 2 == 0)


def _panels(maps: Maps) -> int:
    if maps.gated:
        return -(-(maps.outputs // 2) // (PANEL // 2))
    return -(-maps.outputs // PANEL)


def _tied_head(shape: ModelShape, precision: Precision) -> int:
    """Bytes of a table that is the language head as well, and of the packed copy that a small one gets."""
    (maps,) = shape.maps["head"]
    format = precision.format_of("head")
    if format not in FLOATS:
        return map_bytes(maps, format, precision)
    plain = maps.weights * FLOATS[format]
    if precision.storage == "plain" or maps.weights > TIED_HEAD_PACK_SHARE * shape.parameters:
        return plain
    return plain + map_bytes(maps, format, precision)


def _padded(side: int, step: int) -> int:
    return -(-side // step) * step
