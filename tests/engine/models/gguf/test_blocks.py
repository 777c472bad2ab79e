"""Codes and values of every type equal those of the package gguf bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from fovea.engine.models.gguf.blocks import FLOATS, LAYOUTS, unpack, values
from fovea.engine.models.gguf.reader import TYPES
from fovea.kernels.codes import Codes

QUANTIZED = [kind.name for kind in TYPES.values() if kind.name not in FLOATS]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_values_equal_those_of_the_package(kind: str) -> None:
    """All bytes are random, so scales are of any size and sign, and may be infinite."""
    number = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[number]
    rows, width = 16, 768
    raw = np.random.default_rng(0).integers(0, 256, (rows, width // block, nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(rows, -1), number)
        found = values(kind, raw)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)) or _same(found, expected)
    if kind in LAYOUTS:
        layout = LAYOUTS[kind]
        codes = Codes(
            **{name: torch.from_numpy(array) for name, array in unpack(kind, raw).items()},
            bits=layout.bits, group=layout.group, zero=layout.zero, outer_groups=layout.outer_groups,
        )  # fmt: skip
        assert codes.shape == (rows, width)
        assert int(codes.codes.max()) < 1 << layout.bits
        assert _same(codes.values().numpy(), expected)


def test_the_sizes_of_blocks_are_those_of_the_package() -> None:
    for number, kind in TYPES.items():
        named = gguf.GGMLQuantizationType(number)
        assert named.name == kind.name
        assert gguf.GGML_QUANT_SIZES[named] == (kind.values, kind.nbytes)


def _same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether all bits are equal, except those of numbers that are none."""
    none = np.isnan(expected)
    return np.array_equal(np.isnan(found), none) and np.array_equal(
        found.view(np.uint32)[~none], expected.view(np.uint32)[~none]
    )
