"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

They take images of any resolution, have rotary positions, and merge 2x2 patches to one visual token.

One class implements all three. They differ in three things: the norm and MLP of the blocks; windowed
attention in most blocks (Qwen2.5); and learned positions in addition to the rotary ones, with DeepStack
(Qwen3), which passes the output of some blocks to the first decoder layers. Every image is encoded alone, so
its tokens do not depend on what else the same step computes.

`StaticQwen` cuts a tower into segments: runs of blocks for one grid. All shapes are fixed, so they can be
built.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fovea.engine.layers.linear import Embedding, GatedMLP, LayerNorm, Linear, PatchLinear, PlainMLP, RMSNorm
from fovea.engine.vision.any_size import (
    MAX_GRIDS,
    Block,
    PositionTable,
    TappedAttention,
    add_positions,
    patch_angles,
    tap_block,
    tap_tensors,
)
from fovea.engine.vision.built.formats import RunSegment
from fovea.engine.vision.built.manifest import Grid
from fovea.engine.vision.calls import ProjectorLayer, apply_by_rows, run_blocks
from fovea.engine.vision.encoding import Slices, VisualShape, run_to_end
from fovea.engine.vision.processor.sizes import window_order
from fovea.kernels.spans import attend_runs
from fovea.kernels.transfer import to_device
from fovea.planner.shape import Tower


@dataclass(frozen=True, slots=True)
class QwenVisionConfig:
    """Shape of a Qwen vision tower.

    generation: "2", "2.5" or "3".
    window: side of an attention window in visual tokens; 0: no windows.
    full: numbers of the blocks that attend to the whole frame, where `window` is not 0.
    positions: entries of the learned position table; 0: no learned positions.
    deepstack: numbers of the blocks whose output goes to the decoder's first layers as well.
    """

    generation: str
    depth: int
    hidden: int
    heads: int
    intermediate: int
    out_hidden: int
    activation: str
    channels: int
    patch: int
    temporal: int
    merge: int
    theta: float
    window: int = 0
    full: tuple[int, ...] = ()
    positions: int = 0
    deepstack: tuple[int, ...] = ()


class QwenVisionTower(nn.Module):
    """The vision tower of a Qwen-VL model. Its attribute names are those of the checkpoints."""

    def __init__(self, config: QwenVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = _PatchEmbed(config)
        self.pos_embed = Embedding(config.positions, config.hidden) if config.positions else None
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.depth))
        self.merger = _Merger3(config, joined_norm=False) if config.generation == "3" else _Merger2(config)
        self.deepstack_merger_list = nn.ModuleList(
            _Merger3(config, joined_norm=True) for _ in config.deepstack
        )
        self._geometries: OrderedDict[tuple[int, int, int], Geometry] = OrderedDict()

    @property
    def merge(self) -> int:
        return self.config.merge

    @property
    def crop_invariant(self) -> bool:
        return self.pos_embed is None

    @property
    def corners(self) -> bool:
        return True

    @property
    def patch_weight(self) -> Tensor:
        return self.patch_embed.proj.weight

    def slices(
        self, patches: Tensor, grid: tuple[int, int, int], at: NDArray[np.float32] | None = None
    ) -> Slices[tuple[Tensor, list[Tensor]]]:
        """Encode patches, see `AnySizeTower.slices`."""
        geometry = self._geometry(grid)
        x = yield from self.embed(patches, grid, at)
        features, unit, first = [], self.config.merge**2, 0
        for merger, tap in zip(self.deepstack_merger_list, self.config.deepstack, strict=True):
            x = yield from self._run(x, geometry, first, tap + 1)
            features.append((yield from apply_by_rows(ProjectorLayer(merger), x, unit=unit)))
            first = tap + 1
        x = yield from self._run(x, geometry, first, self.config.depth)
        merged = yield from apply_by_rows(ProjectorLayer(self.merger), x, unit=unit)
        return merged if geometry.back is None else merged[geometry.back], features

    def embed(
        self, patches: Tensor, grid: tuple[int, int, int], at: NDArray[np.float32] | None = None
    ) -> Slices[Tensor]:
        """Return the rows (patches, hidden) that the first block gets. at: see `AnySizeTower.slices`."""
        geometry = self._geometry(grid)
        if at is not None and self.pos_embed is not None:
            taps, weights = tap_tensors(self._table.taps_at(at), self.patch_weight.device)
            geometry = replace(geometry, taps=taps, tap_weights=weights)
        return self._embed(patches, geometry)

    def tap(self, patches: Tensor, grid: tuple[int, int, int]) -> TappedAttention:
        """Attention inputs of the last block without windows, see `AnySizeTower.tap`."""
        config, geometry = self.config, self.geometry(grid)
        tapped = config.full[-1] if config.window else config.depth - 1
        blocks = cast("list[Block]", list(self.blocks))
        x = run_to_end(self._embed(patches, geometry))
        x = run_to_end(self._run(x, geometry, 0, tapped))
        return tap_block(blocks[tapped], x, geometry.cos, geometry.sin, geometry.back)

    def _run(self, x: Tensor, geometry: Geometry, first: int, last: int) -> Slices[Tensor]:
        """Compute blocks first..last-1."""
        blocks = cast("list[Block]", list(self.blocks[first:last]))
        which = [
            int(self.config.window > 0 and block not in self.config.full) for block in range(first, last)
        ]
        runs = (geometry.full, geometry.windows)
        return run_blocks(blocks, x, geometry.cos, geometry.sin, runs, which)

    def _embed(self, patches: Tensor, geometry: Geometry) -> Slices[Tensor]:
        """Embed the patches, with learned positions if there are any, in the tower's order."""
        if geometry.order is not None:
            # The tokens of a window become neighbours once, here, so that no block has to gather them.
            patches = self._tokens(patches)[geometry.order].flatten(0, 1)
        x = yield from apply_by_rows(self.patch_embed, patches)
        if self.pos_embed is not None and geometry.taps is not None and geometry.tap_weights is not None:
            x = yield from add_positions(x, self.pos_embed, geometry.taps, geometry.tap_weights)
        return x

    @property
    def _table(self) -> PositionTable:
        return PositionTable(int(self.config.positions**0.5), corners=True)

    def shape(self, grid: tuple[int, int, int]) -> VisualShape:
        """Count the rows that are computed for a grid (t, h, w) of patches. Any thread may call it."""
        geometry, config = self.geometry(grid), self.config
        patches = grid[0] * grid[1] * grid[2]
        full_blocks = len(config.full) if config.window else config.depth
        full, windows = (
            sum(groups * count**2 for groups, count in runs) for runs in (geometry.full, geometry.windows)
        )
        pairs = full_blocks * full + (config.depth - full_blocks) * windows
        return VisualShape(patches, patches, patches // config.merge**2, config.hidden, pairs)

    def tower_shape(self) -> Tower:
        """Return the numbers from which the rows of an image follow."""
        config, merged = self.config, self.config.merge**2
        full = len(config.full) if config.window else config.depth
        return Tower(
            config.hidden,
            merged,
            full_layers=full,
            window_layers=config.depth - full,
            window_rows=config.window**2 * merged,
            projector_rows_per_patch=1 / merged,
        )

    def _tokens(self, patches: Tensor) -> Tensor:
        """Reshape (patches, ...) to (visual tokens, patches per token, ...)."""
        return patches.view(-1, self.config.merge**2, *patches.shape[1:])

    def _geometry(self, grid: tuple[int, int, int]) -> Geometry:
        geometry = self._geometries.get(grid)
        if geometry is None:
            geometry = self.geometry(grid)
            self._geometries[grid] = geometry
            if len(self._geometries) > MAX_GRIDS:
                self._geometries.popitem(last=False)
        self._geometries.move_to_end(grid)
        return geometry

    def geometry(self, grid: tuple[int, int, int]) -> Geometry:
        """Compute the geometry of a grid (t, h, w) without the cache, so that any thread may call it."""
        config = self.config
        device = self.patch_weight.device
        angles = patch_angles(grid, config.merge, config.hidden // config.heads, config.theta)
        taps = weights = None
        if config.positions:
            taps, weights = tap_tensors(self._table.taps(grid, config.merge), device)
        order: Tensor | None = None
        windows: tuple[tuple[int, int], ...] = ()
        if config.window:
            numbers, windows = window_order(grid, config.merge, config.window)
            order = torch.from_numpy(numbers)
            angles = self._tokens(angles)[order].flatten(0, 1)
        return Geometry(
            to_device(angles.cos(), device),
            to_device(angles.sin(), device),
            None if order is None else to_device(order, device),
            None if order is None else to_device(order.argsort(), device),
            ((grid[0], grid[1] * grid[2]),),
            windows,
            taps,
            weights,
        )


@dataclass(frozen=True, slots=True)
class Geometry:
    """Tensors of a tower that depend on the grid alone, in the order in which the tower holds its patches.

    cos, sin: (patches, 1, head_dim) float32, of the rotary positions.
    order: (tokens,), the number in merge order of each visual token that the tower holds; None: it is merge
        order.
    back: the inverse permutation of `order`.
    full: runs (groups, patches per group) of patches that attend to each other in blocks without windows,
        counted from the first patch on.
    windows: such runs in blocks with windows.
    taps: (patches, 4), the four entries of the learned position table that each patch interpolates.
    tap_weights: (patches, 4, 1), the weights of these entries.
    """

    cos: Tensor
    sin: Tensor
    order: Tensor | None
    back: Tensor | None
    full: tuple[tuple[int, int], ...]
    windows: tuple[tuple[int, int], ...]
    taps: Tensor | None
    tap_weights: Tensor | None

    def runs(self, config: QwenVisionConfig, block: int) -> tuple[tuple[int, int], ...]:
        """Return the runs of patches that attend to each other in that block."""
        return self.full if not config.window or block in config.full else self.windows


def _mlp(config: QwenVisionConfig) -> nn.Module:
    if config.generation == "2.5":
        return GatedMLP(config.hidden, config.intermediate, config.activation, bias=True)
    names = ("fc1", "fc2") if config.generation == "2" else ("linear_fc1", "linear_fc2")
    return PlainMLP(config.hidden, config.intermediate, config.activation, names)


def _norm(config: QwenVisionConfig, width: int) -> nn.Module:
    return RMSNorm(width, 1e-6) if config.generation == "2.5" else LayerNorm(width, 1e-6)


def _block(config: QwenVisionConfig) -> Block:
    return Block(config.hidden, config.heads, lambda: _norm(config, config.hidden), _mlp(config))


class _Merger2(nn.Module):
    """Merges the `merge` x `merge` patches of a token, with the attribute names of Qwen2 and Qwen2.5."""

    rowwise = ("forward",)

    def __init__(self, config: QwenVisionConfig) -> None:
        super().__init__()
        self.width = config.hidden * config.merge**2
        self.ln_q = _norm(config, config.hidden)
        self.mlp = nn.ModuleDict(
            {
                "0": Linear(self.width, self.width, bias=True, activation="gelu"),
                "2": Linear(self.width, config.out_hidden, bias=True),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_q(x).view(-1, self.width)
        return self.mlp["2"](self.mlp["0"](x))  # type: ignore[no-any-return]


class _Merger3(nn.Module):
    """Merges the `merge` x `merge` patches of a token, with the attribute names of Qwen3.

    joined_norm: normalise after the patches are joined, as DeepStack's mergers do, instead of before.
    """

    rowwise = ("forward",)

    def __init__(self, config: QwenVisionConfig, *, joined_norm: bool) -> None:
        super().__init__()
        self.width = config.hidden * config.merge**2
        self.joined_norm = joined_norm
        self.norm = LayerNorm(self.width if joined_norm else config.hidden, 1e-6)
        self.linear_fc1 = Linear(self.width, self.width, bias=True, activation="gelu")
        self.linear_fc2 = Linear(self.width, config.out_hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self.width) if self.joined_norm else x).view(-1, self.width)
        return self.linear_fc2(self.linear_fc1(x))  # type: ignore[no-any-return]


class _PatchEmbed(nn.Module):
    def __init__(self, config: QwenVisionConfig) -> None:
        super().__init__()
        kernel = (config.channels, config.temporal, config.patch, config.patch)
        self.proj = PatchLinear(kernel, config.hidden, bias=config.generation == "3")

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)  # type: ignore[no-any-return]


class QwenSegment(nn.Module):
    """Blocks [first, last) of a tower as one function without slices.

    It takes rows (T, hidden), the first segment those of `QwenVisionTower.embed`. The last segment returns
    visual tokens (T / merge^2, out_hidden), the others rows (T, hidden). After them come the DeepStack
    features of these blocks.
    """

    def __init__(self, tower: QwenVisionTower, geometry: Geometry, first: int, last: int) -> None:
        super().__init__()
        config = tower.config
        ends = last == config.depth
        self.blocks = nn.ModuleList(tower.blocks[first:last])
        self.merger = tower.merger if ends else None
        self.mergers = nn.ModuleDict(
            {
                str(block - first): merger
                for block, merger in zip(config.deepstack, tower.deepstack_merger_list, strict=True)
                if first <= block < last
            }
        )
        self.runs = [geometry.runs(config, index) for index in range(first, last)]
        self.cos: Tensor
        self.sin: Tensor
        self.back: Tensor | None
        self.register_buffer("cos", geometry.cos)
        self.register_buffer("sin", geometry.sin)
        self.register_buffer("back", geometry.back if ends else None)

    @property
    def shape(self) -> tuple[object, ...]:
        """Description of the code, equal for segments of one grid that differ only in their weights."""
        return self.merger is None, tuple(self.runs), tuple(self.mergers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        features = []
        for index, block in enumerate(cast("Iterable[Block]", self.blocks)):
            qkv = block.before(x, self.cos, self.sin)
            x = block.after(attend_runs(qkv, self.runs[index], block.attn.heads), x)
            if str(index) in self.mergers:
                features.append(self.mergers[str(index)](x))
        if self.merger is not None:
            x = self.merger(x)
        if self.back is not None:
            x = x[self.back]
        return x, *features


@dataclass(frozen=True, slots=True)
class StaticQwen:
    """A Qwen tower that can be built ahead of time: for each grid, segments with fixed shapes."""

    tower: QwenVisionTower

    def segments(self, grid: Grid, blocks: int) -> list[QwenSegment]:
        """Cut the tower for a grid into runs of `blocks` blocks; the last may be shorter.

        They use the model's own layers, and share one geometry.
        """
        geometry, depth = self.tower.geometry(grid), self.tower.config.depth
        firsts = range(0, depth, blocks)
        return [QwenSegment(self.tower, geometry, first, min(depth, first + blocks)) for first in firsts]

    def input_shape(self, grid: Grid) -> tuple[int, int]:
        """Shape of the tower's input for a grid: (patches, values per patch)."""
        return grid[0] * grid[1] * grid[2], self.tower.patch_embed.proj.in_features

    def run(
        self,
        segments: Sequence[RunSegment],
        patches: Tensor,
        grid: Grid,
        at: NDArray[np.float32] | None = None,
    ) -> Slices[tuple[Tensor, list[Tensor]]]:
        """Encode patches by the built segments of their grid. The result is that of `slices`.

        Where the patches are in their image is no part of the segments, so a region of an image and a whole
        image share those of one grid.

        at: see `AnySizeTower.slices`.
        """
        x = yield from self.tower.embed(patches, grid, at)
        features = []
        dtype = x.dtype
        for segment in segments:
            x, *tapped = segment(x)
            features += tapped
            yield None
        return x.to(dtype), [feature.to(dtype) for feature in features]

    def slices(self, patches: Tensor, grid: Grid) -> Slices[tuple[Tensor, list[Tensor]]]:
        """Run the eager tower. The result is the visual tokens, and one such tensor per DeepStack block."""
        return self.tower.slices(patches, grid)

    def cast(self, dtype: torch.dtype) -> None:
        """Convert the model's own weights to a type."""
        self.tower.to(dtype)
