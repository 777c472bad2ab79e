"""A SigLIP tower that takes pictures of any size, after NaViT (arXiv 2307.06304), as PaddleOCR-VL has it.

Its layers are those of `vit`. Learned positions are interpolated to each picture's grid, and rotary positions
turn queries and keys in addition. Patches come in merge order, so that the projector joins neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fovea.engine.layers.norm import LayerNorm
from fovea.engine.vision.any_size import (
    TappedAttention,
    add_positions,
    block_slices,
    patch_angles,
    tap_block,
)
from fovea.engine.vision.resample import PositionTable
from fovea.engine.vision.shape import VisualShape
from fovea.engine.vision.slices import Slices, apply_by_rows, as_projector, run_to_end
from fovea.engine.vision.vit import Embeddings, Encoder, Layer, ViTConfig

At = NDArray[np.float32] | None


class NaViT(nn.Module):
    """The tower without its projector. Its attribute names are those of the checkpoints.

    config: shape of embeddings and layers; `image_size` sets the size of the table of learned positions.
    merge: patches per side of a visual token.
    theta: base of the rotary frequencies.
    """

    def __init__(self, config: ViTConfig, merge: int, theta: float) -> None:
        super().__init__()
        self.config, self.merge, self.theta = config, merge, theta
        self.table = PositionTable(config.side, corners=False)
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.post_layernorm = LayerNorm(config.hidden, config.eps)

    def slices(self, patches: Tensor, grid: tuple[int, int, int], at: At = None) -> Slices[Tensor]:
        """Encode patches to rows (patches, hidden), one slice at a time.

        patches, grid, at: see `AnySizeTower.slices`.
        """
        x = yield from self._embed(patches, grid, at)
        cos, sin = self._rotary(grid)
        for layer in cast("Iterable[Layer]", self.encoder.layers):
            x = yield from block_slices(layer, x, cos, sin, ((grid[0], grid[1] * grid[2]),))
        return (yield from apply_by_rows(self.post_layernorm, x))

    def tap(self, patches: Tensor, grid: tuple[int, int, int]) -> TappedAttention:
        """Attention inputs of the last layer, see `AnySizeTower.tap`."""
        *layers, last = cast("Iterable[Layer]", self.encoder.layers)
        cos, sin = self._rotary(grid)
        x = run_to_end(self._embed(patches, grid, None))
        for layer in layers:
            x = run_to_end(block_slices(layer, x, cos, sin, ((grid[0], grid[1] * grid[2]),)))
        return tap_block(last, x, cos, sin)

    def shape(self, grid: tuple[int, int, int]) -> VisualShape:
        """Count the rows that are computed for a grid (t, h, w) of patches. Any thread may call it."""
        frame = grid[1] * grid[2]
        patches, config = grid[0] * frame, self.config
        pairs = config.depth * grid[0] * frame**2
        return VisualShape(patches, patches, patches // self.merge**2, config.hidden, pairs)

    def _embed(self, patches: Tensor, grid: tuple[int, int, int], at: At) -> Slices[Tensor]:
        x = yield from apply_by_rows(self.embeddings.patch_embedding, patches)
        taps, weights = self.table.taps(grid, self.merge) if at is None else self.table.taps_at(at)
        index = torch.from_numpy(taps).to(x.device)
        weight = torch.from_numpy(weights).to(x.device)[:, :, None]
        return (yield from add_positions(x, self.embeddings.position_embedding, index, weight))

    def _rotary(self, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        angles = patch_angles(grid, self.merge, self.config.hidden // self.config.heads, self.theta)
        device = self.embeddings.patch_embedding.weight.device
        return angles.cos().to(device), angles.sin().to(device)


@dataclass(frozen=True, slots=True)
class ProjectedNaViT:
    """A tower and its projector together, an `AnySizeTower`.

    projector: turns the rows of whole visual tokens (rows, hidden) into (tokens, decoder width).
    """

    tower: NaViT
    projector: nn.Module

    @property
    def merge(self) -> int:
        return self.tower.merge

    @property
    def crop_invariant(self) -> bool:
        return False

    @property
    def corners(self) -> bool:
        return self.tower.table.corners

    @property
    def patch_weight(self) -> Tensor:
        return self.tower.embeddings.patch_embedding.weight

    def slices(
        self, patches: Tensor, grid: tuple[int, int, int], at: At = None
    ) -> Slices[tuple[Tensor, list[Tensor]]]:
        """Encode patches to visual tokens, see `AnySizeTower.slices`."""
        rows = yield from self.tower.slices(patches, grid, at)
        unit = self.tower.merge**2
        return (yield from apply_by_rows(as_projector(self.projector), rows, unit=unit)), []

    def tap(self, patches: Tensor, grid: tuple[int, int, int]) -> TappedAttention:
        return self.tower.tap(patches, grid)
