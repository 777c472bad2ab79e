"""Qwen towers cut into segments: runs of blocks for one grid. All shapes are fixed, so they can be built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.engine.vision.blocks import Block
from fovea.engine.vision.built.manifest import Grid
from fovea.engine.vision.qwen import Geometry, QwenVisionTower
from fovea.engine.vision.slices import Slices


class QwenSegment(nn.Module):
    """Blocks [first, last) of a tower as one function without slices.

    The first segment takes patches (T, values), the others rows (T, hidden). The last segment returns visual
    tokens (T / merge^2, out_hidden), the others rows (T, hidden). After them come the DeepStack features of
    these blocks.
    """

    def __init__(self, tower: QwenVisionTower, geometry: Geometry, first: int, last: int) -> None:
        super().__init__()
        config = tower.config
        starts, ends = first == 0, last == config.depth
        self.merge = config.merge
        self.patch_embed = tower.patch_embed if starts else None
        self.pos_embed = tower.pos_embed if starts else None
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
        self.order: Tensor | None
        self.back: Tensor | None
        self.taps: Tensor | None
        self.tap_weights: Tensor | None
        self.register_buffer("cos", geometry.cos)
        self.register_buffer("sin", geometry.sin)
        self.register_buffer("order", geometry.order if starts else None)
        self.register_buffer("back", geometry.back if ends else None)
        self.register_buffer("taps", geometry.taps if starts else None)
        self.register_buffer("tap_weights", geometry.tap_weights if starts else None)

    @property
    def module(self) -> nn.Module:
        return self

    @property
    def shape(self) -> tuple[object, ...]:
        """Description of the code, equal for segments of one grid that differ only in their weights."""
        return self.patch_embed is None, self.merger is None, tuple(self.runs), tuple(self.mergers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self._embed(x)
        features = []
        for index, block in enumerate(cast("Iterable[Block]", self.blocks)):
            qkv = block.before(x, self.cos, self.sin)
            x = block.after(_attend(qkv, self.runs[index], block.attn.heads), x)
            if str(index) in self.mergers:
                features.append(self.mergers[str(index)](x))
        if self.merger is not None:
            x = self.merger(x)
        if self.back is not None:
            x = x[self.back]
        return x, *features

    def _embed(self, x: Tensor) -> Tensor:
        if self.patch_embed is None:
            return x
        if self.order is not None:
            x = x.view(-1, self.merge**2, x.shape[1])[self.order].flatten(0, 1)
        x = self.patch_embed(x)
        if self.pos_embed is not None and self.taps is not None and self.tap_weights is not None:
            x = x + (self.pos_embed(self.taps) * self.tap_weights).sum(1).to(x.dtype)
        return x


@dataclass(frozen=True, slots=True)
class StaticQwen:
    """A Qwen tower that can be built ahead of time; implements `StaticEncoder`."""

    tower: QwenVisionTower

    def segments(self, grid: Grid, blocks: int) -> list[QwenSegment]:
        """Runs of `blocks` blocks; the last may be shorter. All share one geometry."""
        geometry, depth = self.tower.geometry(grid), self.tower.config.depth
        firsts = range(0, depth, blocks)
        return [QwenSegment(self.tower, geometry, first, min(depth, first + blocks)) for first in firsts]

    def input_shape(self, grid: Grid) -> tuple[int, int]:
        return grid[0] * grid[1] * grid[2], self.tower.patch_embed.proj.in_features

    def slices(self, patches: Tensor, grid: Grid) -> Slices[tuple[Tensor, list[Tensor]]]:
        return self.tower.slices(patches, grid)

    def cast(self, dtype: torch.dtype) -> None:
        self.tower.to(dtype)


def _attend(qkv: Tensor, runs: tuple[tuple[int, int], ...], heads: int) -> Tensor:
    """Compute `attend_slices` without slices: qkv (T, 3 * heads, head_dim) to (T, heads * head_dim)."""
    outputs, first = [], 0
    for groups, count in runs:
        rows = qkv[first : first + groups * count].view(groups, count, 3, heads, -1)
        output = functional.scaled_dot_product_attention(*rows.permute(2, 0, 3, 1, 4))
        outputs.append(output.transpose(1, 2).reshape(groups * count, -1))
        first += groups * count
    return torch.cat(outputs)
