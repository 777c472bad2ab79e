"""Random input for the tests of token reduction. It belongs to no real image."""

from __future__ import annotations

import torch

from fovea.engine.reduce.base import Probe, ReductionInput

WIDTH, WORDS, BEFORE = 12, 5, 3


def reduction_input(
    rows: int, columns: int, seed: int = 0, *, width: int = WIDTH, dtype: torch.dtype = torch.float32
) -> ReductionInput:
    """Random values in every field that a method may read."""
    count, random = rows * columns, torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    length = BEFORE + count + WORDS
    probe = Probe(draw(length, width), draw(length, 2, 4), draw(count).softmax(0), BEFORE)
    return ReductionInput(
        draw(count, width).to(dtype), (rows, columns), f"image {seed}", query=draw(WORDS, width).to(dtype),
        attention=draw(count).softmax(0), keys=draw(count, 6), probe=probe,
    )  # fmt: skip
