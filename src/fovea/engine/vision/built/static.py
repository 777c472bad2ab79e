"""What can be built: an encoder that is one function of its patches for every grid, in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fovea.engine.vision.built.manifest import Grid
from fovea.engine.vision.slices import Slices


class StaticPart(Protocol):
    @property
    def module(self) -> nn.Module: ...

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for parts of one grid that differ in their weights alone."""
        ...


class StaticEncoder(Protocol):
    def parts(self, grid: Grid, blocks: int) -> Sequence[StaticPart]:
        """Over the model's own layers, `blocks` blocks in each."""
        ...

    def input_shape(self, grid: Grid) -> tuple[int, int]:
        """(patches, values of a patch)."""
        ...

    def slices(self, patches: Tensor, grid: Grid) -> Slices[tuple[Tensor, list[Tensor]]]:
        """The eager encoder: visual tokens, and one such tensor per DeepStack block."""
        ...

    def cast(self, dtype: torch.dtype) -> None:
        """Change the type of the model's own weights."""
        ...
