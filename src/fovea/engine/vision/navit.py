"""A SigLIP tower that takes pictures of any size, after NaViT (arXiv 2307.06304), as PaddleOCR-VL has it.

Its layers are those of `vit`. Learned positions are interpolated to each picture's grid, and rotary positions
turn queries and keys in addition. Patches come in merge order, so that the projector joins neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from fovea.engine.layers.norm import LayerNorm
from fovea.engine.vision.any_size import RotaryBlock, TappedAttention
from fovea.engine.vision.full_attention import At, FullAttention
from fovea.engine.vision.resample import PositionTable
from fovea.engine.vision.shape import VisualShape
from fovea.engine.vision.slices import Slices, apply_by_rows, as_projector, run_to_end
from fovea.engine.vision.vit import Embeddings, Encoder, ViTConfig
from fovea.planner.shape import Tower


class NaViT(nn.Module):
    """The tower without its projector. Its attribute names are those of the checkpoints.

    config: shape of embeddings and layers; `image_size` sets the size of the table of learned positions.
    merge: patches per side of a visual token.
    theta: base of the rotary frequencies.
    """

    def __init__(self, config: ViTConfig, merge: int, theta: float) -> None:
        super().__init__()
        self.config = config
        table, head_dim = PositionTable(config.side, corners=False), config.hidden // config.heads
        self.full = FullAttention(table, merge, config.heads, head_dim, theta)
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.post_layernorm = LayerNorm(config.hidden, config.eps)

    def slices(self, patches: Tensor, grid: tuple[int, int, int], at: At = None) -> Slices[Tensor]:
        """Encode patches to rows (patches, hidden), one slice at a time.

        patches, grid, at: see `AnySizeTower.slices`.
        """
        x = yield from self._embed(patches, grid, at)
        x = yield from self.full.run(self._layers, x, grid)
        return (yield from apply_by_rows(self.post_layernorm, x))

    def tap(self, patches: Tensor, grid: tuple[int, int, int]) -> TappedAttention:
        """Attention inputs of the last layer, see `AnySizeTower.tap`."""
        return self.full.tap(self._layers, run_to_end(self._embed(patches, grid, None)), grid)

    def shape(self, grid: tuple[int, int, int]) -> VisualShape:
        """Count the rows that are computed for a grid (t, h, w) of patches. Any thread may call it."""
        return self.full.shape(grid, self.config.depth)

    def tower_shape(self) -> Tower:
        """Return the numbers from which the rows of an image follow."""
        return self.full.tower_shape(self.config.depth)

    @property
    def _layers(self) -> list[RotaryBlock]:
        return cast("list[RotaryBlock]", list(self.encoder.layers))

    def _embed(self, patches: Tensor, grid: tuple[int, int, int], at: At) -> Slices[Tensor]:
        x = yield from apply_by_rows(self.embeddings.patch_embedding, patches)
        return (yield from self.full.add_learned(x, self.embeddings.position_embedding, grid, at))


@dataclass(frozen=True, slots=True)
class ProjectedNaViT:
    """A tower and its projector together, an `AnySizeTower`.

    projector: turns the rows of whole visual tokens (rows, hidden) into (tokens, decoder width).
    """

    tower: NaViT
    projector: nn.Module

    @property
    def merge(self) -> int:
        return self.tower.full.merge

    @property
    def crop_invariant(self) -> bool:
        return False

    @property
    def corners(self) -> bool:
        return self.tower.full.table.corners

    @property
    def patch_weight(self) -> Tensor:
        return self.tower.embeddings.patch_embedding.weight

    def slices(
        self, patches: Tensor, grid: tuple[int, int, int], at: At = None
    ) -> Slices[tuple[Tensor, list[Tensor]]]:
        """Encode patches to visual tokens, see `AnySizeTower.slices`."""
        rows = yield from self.tower.slices(patches, grid, at)
        unit = self.merge**2
        return (yield from apply_by_rows(as_projector(self.projector), rows, unit=unit)), []

    def tap(self, patches: Tensor, grid: tuple[int, int, int]) -> TappedAttention:
        return self.tower.tap(patches, grid)
