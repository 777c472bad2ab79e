"""SigLIP towers that take pictures of any size: NaViT, NaFlex, and one that merges patches half-way.

`NaViT` is PaddleOCR-VL's (arXiv 2307.06304), `NaflexTower` the variant of SigLIP 2 (arXiv 2502.14786) in
LFM2-VL, `MergingViT` MiniCPM-V 4.6's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.engine.layers.linear import Embedding, LayerList, LayerNorm, Linear, PatchLinear
from fovea.engine.vision.any_size import At, FullAttention, PositionTable, TappedAttention
from fovea.engine.vision.calls import (
    ProjectorLayer,
    RotaryBlock,
    TileLayer,
    apply_by_rows,
    attend_slices,
    run_blocks,
    run_tiles,
)
from fovea.engine.vision.encoding import Slices, VisualShape, cuts, run_to_end, slice_rows
from fovea.engine.vision.processor.sizes import nested_coordinates
from fovea.engine.vision.vit import Attention, Embeddings, Layer, ViTConfig
from fovea.kernels.transfer import to_device
from fovea.planner.shape import Tower


class NaViT(nn.Module):
    """The tower without its projector. Its attribute names are those of the checkpoints.

    Its layers are those of `vit`. Learned positions are interpolated to each picture's grid, and rotary
    positions turn queries and keys in addition. Patches come in merge order, so that the projector joins
    neighbours.

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
        self.encoder = LayerList(Layer(config) for _ in range(config.depth))
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
        return (yield from apply_by_rows(ProjectorLayer(self.projector), rows, unit=unit)), []

    def tap(self, patches: Tensor, grid: tuple[int, int, int]) -> TappedAttention:
        return self.tower.tap(patches, grid)


MAX_TABLES = 64
"""Most resampled tables that are kept."""


class _Embeddings(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.side = config.side
        values = config.channels * config.patch_size**2
        # The checkpoint's own shape is that of a linear map over the values of a patch.
        self.patch_embedding = PatchLinear((values,), config.hidden, bias=True)
        self.position_embedding = Embedding(config.side**2, config.hidden)
        self._tables: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Embed the patches of pictures of one grid: (pictures, patches, values) to (..., hidden)."""
        x: Tensor = self.patch_embedding(patches)
        return x + self._table(grid)

    def _table(self, grid: tuple[int, int]) -> Tensor:
        """Positions of a grid (rows, columns), (patches, hidden). They do not depend on earlier calls."""
        table = self._tables.get(grid)
        if table is None:
            weight = self.position_embedding.weight
            square = weight.float().view(self.side, self.side, -1).permute(2, 0, 1)[None]
            resized = functional.interpolate(
                square, size=grid, mode="bilinear", align_corners=False, antialias=True
            )
            table = self._tables[grid] = resized[0].flatten(1).T.to(weight.dtype).contiguous()
            if len(self._tables) > MAX_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(grid)
        return table


class NaflexTower(nn.Module):
    """The vision tower. Its attribute names are those of the checkpoints.

    The positions are a table for a square grid. For a picture it is resampled to the picture's own grid
    of patches, with an antialiased bilinear filter. Every picture is encoded alone, so there is no
    padding.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        self.encoder = LayerList(Layer(config) for _ in range(config.depth))
        self.post_layernorm = LayerNorm(config.hidden, config.eps)

    def slices(self, patches: Tensor, grid: tuple[int, int]) -> Slices[Tensor]:
        """Encode pictures of one grid (rows, columns), one layer of some pictures at a time.

        patches: (pictures, rows * columns, channels * patch * patch).

        Returns (pictures, rows * columns, hidden).
        """
        x = self.embeddings(patches, grid)
        x = yield from run_tiles(cast("list[TileLayer]", list(self.encoder.layers)), x)
        return self.post_layernorm(x)  # type: ignore[no-any-return]

    def shape(self, pictures: list[tuple[int, tuple[int, int]]], *, rows_per_token: int) -> VisualShape:
        """Count the rows that are computed. pictures: (number of pictures, their grid)."""
        rows = sum(count * grid[0] * grid[1] for count, grid in pictures)
        pairs = sum(count * (grid[0] * grid[1]) ** 2 for count, grid in pictures)
        projected = rows // rows_per_token
        return VisualShape(rows, rows, projected, self.config.hidden, self.config.depth * pairs)


SQUARE = 4
"""Patches that a merge joins."""
TILE_EDGE = 448
"""Side of the square that has about as many pixels as a picture of the published image processor."""
ACTIVATION = "gelu_pytorch_tanh"
"""Activation of the merge, whatever that of the layers is."""

Pictures = list[tuple[int, tuple[int, int]]]
"""Numbers of pictures, each with their grid (rows, columns) of patches."""


class WindowMerger(nn.Module):
    """Attention inside squares of four rows, and a feed-forward block that makes one row of each square.

    Its attribute names are those of the checkpoints.
    """

    rowwise = ("project", "merge")

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        joined, intermediate = config.hidden * SQUARE, config.intermediate * SQUARE
        self.self_attn = Attention(config)
        self.layer_norm1 = LayerNorm(config.hidden, config.eps)
        self.pre_norm = LayerNorm(joined, config.eps)
        self.linear_1 = Linear(joined, intermediate, bias=True, activation=ACTIVATION)
        self.linear_2 = Linear(intermediate, config.hidden, bias=True)

    def slices(self, x: Tensor) -> Slices[Tensor]:
        """Merge rows x (rows, hidden), squares in order. Returns (rows / 4, hidden)."""
        attention = self.self_attn
        qkv = yield from apply_by_rows(self.project, x)
        squares = ((x.shape[0] // SQUARE, SQUARE),)
        mixed = yield from attend_slices(attention.kernels, qkv, squares, attention.heads)
        outputs = []
        for rows in cuts(x.shape[0], slice_rows(x) // SQUARE * SQUARE):
            outputs.append(self.merge(mixed[rows], x[rows]))
            yield None
        return torch.cat(outputs)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of rows x (T, hidden): (T, 3 * heads, head_dim)."""
        qkv: Tensor = self.self_attn.qkv(self.layer_norm1(x))
        return qkv.view(x.shape[0], 3 * self.self_attn.heads, -1)

    def merge(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Make one row of each square. mixed: output of the attention; x: residual; both (T, hidden)."""
        x = self.self_attn.out_proj(mixed, x)
        squares = x.view(-1, SQUARE, x.shape[1])
        return self.linear_2(self.linear_1(self.pre_norm(squares.flatten(1))), squares.mean(1))  # type: ignore[no-any-return]


class MergingViT(nn.Module):
    """The tower. Its attribute names are those of the checkpoints.

    The layers are those of `vit`. The layers after the merge compute a quarter of the rows. Pictures have any
    size; each patch takes the entry of the square table of positions at its fraction of the picture (NaViT,
    arXiv 2307.06304).

    Patches come in nested order (`nested_coordinates`): the four patches of a square are neighbours in the
    list, and so are the four squares that the projector merges next. So no merge has to move a row.

    config: shape of embeddings and layers; `image_size` sets the size of the table of positions. merge_after:
    number of layers before the merge, at least 1; None: the tower has no merge.
    """

    def __init__(self, config: ViTConfig, merge_after: int | None) -> None:
        super().__init__()
        self.config = config
        self.merge_after = config.depth if merge_after is None else merge_after
        # The projector merges once more, after the tower.
        self.merges = 1 if merge_after is None else 2
        self.embeddings = Embeddings(config)
        self.encoder = LayerList(Layer(config) for _ in range(config.depth))
        self.vit_merger = None if merge_after is None else WindowMerger(config)
        self.post_layernorm = LayerNorm(config.hidden, config.eps)

    def slices(self, patches: Tensor, grid: tuple[int, int]) -> Slices[Tensor]:
        """Encode pictures of one grid (rows, columns) of patches, one slice at a time.

        patches: (pictures, rows * columns, channels * patch * patch), in nested order.

        Returns (rows, hidden) in the same order: a row per patch, or one per square of four.
        """
        pictures = patches.shape[0]
        positions = self.embeddings.position_embedding(to_device(self._positions(grid), patches.device))
        x = yield from apply_by_rows(self.embeddings.patch_embedding, patches.flatten(0, 1))
        x = (x.view(*patches.shape[:2], -1) + positions).flatten(0, 1)
        x = yield from self._run(self._layers[: self.merge_after], x, pictures)
        if self.vit_merger is not None:
            x = yield from self.vit_merger.slices(x)
            x = yield from self._run(self._layers[self.merge_after :], x, pictures)
        return (yield from apply_by_rows(self.post_layernorm, x))

    @staticmethod
    def _run(layers: list[RotaryBlock], x: Tensor, pictures: int) -> Slices[Tensor]:
        return run_blocks(layers, x, None, None, (((pictures, x.shape[0] // pictures),),))

    def shape(self, pictures: Pictures) -> VisualShape:
        """Count the rows that are computed."""
        hidden, depth, before = self.config.hidden, self.config.depth, self.merge_after
        counts = [(count, grid[0] * grid[1]) for count, grid in pictures]
        patches = sum(count * rows for count, rows in counts)
        pairs = before * sum(count * rows**2 for count, rows in counts)
        merged = 0
        if self.vit_merger is not None:
            merged = patches // SQUARE
            pairs += patches * SQUARE
            pairs += (depth - before) * sum(count * (rows // SQUARE) ** 2 for count, rows in counts)
        projected = patches // SQUARE**self.merges
        return VisualShape(patches, patches, projected, hidden, pairs, merged)

    def tower_shape(self) -> Tower:
        """Return the numbers from which the rows of an image follow."""
        config, merged = self.config, SQUARE**self.merges
        shape = Tower(
            config.hidden,
            merged,
            tiling="equal",
            tile_tokens=(TILE_EDGE // config.patch_size) ** 2 // merged,
            full_layers=self.merge_after,
            projector_rows_per_patch=1 / merged,
        )
        if self.vit_merger is None:
            return shape
        return replace(
            shape,
            window_layers=1,  # the merge itself attends inside its squares
            window_rows=SQUARE,
            merged_layers=config.depth - self.merge_after,
            merged_rows_per_patch=1 / SQUARE,
        )

    def merged_modules(self) -> list[nn.Module]:
        """The modules that get the merged rows."""
        if self.vit_merger is None:
            return []
        after = list(self.encoder.layers)[self.merge_after :]
        return [self.vit_merger.linear_1, self.vit_merger.linear_2, *after]

    @property
    def _layers(self) -> list[RotaryBlock]:
        return cast("list[RotaryBlock]", list(self.encoder.layers))

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """Entries of the position table for the patches of a grid, (patches,), on the CPU.

        The floating-point expressions must not change: a patch on a boundary would get another entry.
        """
        side = self.config.side
        boundaries = torch.arange(1 / side, 1.0, 1 / side)
        down, across = (
            torch.bucketize(torch.arange(count) / count, boundaries, right=True) for count in grid
        )
        rows, columns = torch.from_numpy(nested_coordinates(grid, self.merges)).unbind(1)
        return down[rows] * side + across[columns]
