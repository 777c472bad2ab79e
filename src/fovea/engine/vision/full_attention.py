"""The common part of towers for pictures of any size in which all patches of a picture attend to each other.

Such a tower has learned positions, which are interpolated to each picture's grid, and rotary ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.layers.linear import Embedding
from fovea.engine.vision.any_size import (
    RotaryBlock,
    TappedAttention,
    add_positions,
    block_slices,
    patch_angles,
    tap_block,
)
from fovea.engine.vision.resample import PositionTable
from fovea.engine.vision.shape import VisualShape
from fovea.engine.vision.slices import Slices, run_to_end
from fovea.planner.shape import Tower

At = NDArray[np.float32] | None
"""Places of patches in the whole image, see `AnySizeTower.slices`."""


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Positions of patches and passes through the blocks.

    table: how the table of learned positions is read.
    merge: patches per side of a visual token.
    heads, head_dim: number of attention heads of a block, and their width.
    theta: base of the rotary frequencies.
    """

    table: PositionTable
    merge: int
    heads: int
    head_dim: int
    theta: float

    def add_learned(
        self, x: Tensor, entries: Embedding, grid: tuple[int, int, int], at: At
    ) -> Slices[Tensor]:
        """Add learned positions to rows x (patches, hidden), which are changed and returned.

        entries: the table. grid, at: see `AnySizeTower.slices`.
        """
        taps, weights = self.table.taps(grid, self.merge) if at is None else self.table.taps_at(at)
        index, weight = torch.from_numpy(taps).to(x.device), torch.from_numpy(weights).to(x.device)
        return (yield from add_positions(x, entries, index, weight[:, :, None]))

    def run(self, blocks: Sequence[RotaryBlock], x: Tensor, grid: tuple[int, int, int]) -> Slices[Tensor]:
        """Compute blocks one slice at a time. x (patches, hidden) is changed in place and returned."""
        cos, sin = self._rotary(grid, x.device)
        for block in blocks:
            x = yield from block_slices(block, x, cos, sin, ((grid[0], grid[1] * grid[2]),))
        return x

    def tap(self, blocks: Sequence[RotaryBlock], x: Tensor, grid: tuple[int, int, int]) -> TappedAttention:
        """Compute all blocks but the last, and return the attention inputs of the last one."""
        x = run_to_end(self.run(blocks[:-1], x, grid))
        return tap_block(blocks[-1], x, *self._rotary(grid, x.device))

    def shape(self, grid: tuple[int, int, int], depth: int) -> VisualShape:
        """Count the rows that `depth` blocks compute for a grid (t, h, w). Any thread may call it."""
        frame = grid[1] * grid[2]
        patches, hidden = grid[0] * frame, self.heads * self.head_dim
        return VisualShape(patches, patches, patches // self.merge**2, hidden, depth * grid[0] * frame**2)

    def tower_shape(self, depth: int) -> Tower:
        """Return the numbers from which the rows of an image follow."""
        merged, hidden = self.merge**2, self.heads * self.head_dim
        return Tower(hidden, merged, full_layers=depth, projector_rows_per_patch=1 / merged)

    def _rotary(self, grid: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        angles = patch_angles(grid, self.merge, self.head_dim, self.theta)
        return angles.cos().to(device), angles.sin().to(device)
