"""The interface of encoders that can be built: for each grid, a sequence of segments with fixed shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fovea.engine.vision.built.manifest import Grid
from fovea.engine.vision.slices import Slices


class StaticSegment(Protocol):
    """A run of an encoder's blocks for one grid.

    The first segment also contains the patch embedding, the last one the merger.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def shape(self) -> tuple[object, ...]:
        """Description of the code, equal for segments of one grid that differ only in their weights."""
        ...


class StaticEncoder(Protocol):
    """An encoder that can be built."""

    def segments(self, grid: Grid, blocks: int) -> Sequence[StaticSegment]:
        """Cut the encoder for a grid into segments of `blocks` blocks. They use the model's own layers."""
        ...

    def input_shape(self, grid: Grid) -> tuple[int, int]:
        """Shape of the encoder's input for a grid: (patches, values per patch)."""
        ...

    def slices(self, patches: Tensor, grid: Grid) -> Slices[tuple[Tensor, list[Tensor]]]:
        """Run the eager encoder. The result is the visual tokens, and one such tensor per DeepStack block."""
        ...

    def cast(self, dtype: torch.dtype) -> None:
        """Convert the model's own weights to a type."""
        ...
