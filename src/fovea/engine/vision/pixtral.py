"""The Pixtral vision tower (arXiv 2410.07073): images of any size, rotary positions in two dimensions.

Patches are held row by row. Every image is encoded alone, so each patch attends to all patches of its image
and the attention needs no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from fovea.engine.layers.linear import FusedLinear, GatedMLP, LayerList, Linear, PatchLinear, RMSNorm
from fovea.engine.vision.calls import apply_by_rows, run_blocks
from fovea.engine.vision.encoding import Slices, VisualShape
from fovea.kernels.base import Kernels
from fovea.kernels.torch_kernels import PLAIN

EPS = 1e-5
"""Constant of all norms of the tower. Configurations do not name it."""


@dataclass(frozen=True, slots=True)
class PixtralConfig:
    """Shape of a Pixtral tower.

    patch: side of a patch, in pixels.
    theta: base of the rotary frequencies.
    taps: hidden states that are concatenated to the output; 0 is the embeddings, n the output of the n-th
        layer. Layers after the last tap are not built.
    """

    hidden: int
    heads: int
    intermediate: int
    activation: str
    patch: int
    channels: int
    theta: float
    taps: tuple[int, ...]

    @property
    def depth(self) -> int:
        return max(self.taps)


class _Attention(nn.Module):
    kernels: Kernels = PLAIN

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.heads = config.heads
        width = config.hidden
        self.qkv = FusedLinear(width, dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), bias=False)
        self.o_proj = Linear(width, width, bias=False)


class PixtralBlock(nn.Module):
    """One transformer block: attention and gated MLP, each after a norm."""

    rowwise = ("before", "after")

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, EPS)
        self.attention = _Attention(config)
        self.ffn_norm = RMSNorm(config.hidden, EPS)
        self.feed_forward = GatedMLP(config.hidden, config.intermediate, config.activation, bias=False)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of rows x (T, hidden), not rotated: (T, 3 * heads, head_dim)."""
        qkv: Tensor = self.attention.qkv(self.attention_norm(x))
        return qkv.view(x.shape[0], 3 * self.attention.heads, -1)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values of rows x, queries and keys rotated."""
        return self.attention.kernels.rotate(self.project(x), 2 * self.attention.heads, cos, sin)

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Apply output projection, norm and MLP to attention output `mixed` of rows x, both (T, hidden)."""
        attended = self.attention.o_proj(mixed, x)
        return self.feed_forward(self.ffn_norm(attended), attended)  # type: ignore[no-any-return]


class PixtralTower(nn.Module):
    """A Pixtral tower. Its attribute names are those of the checkpoints."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_conv = PatchLinear(
            (config.channels, config.patch, config.patch), config.hidden, bias=False
        )
        self.ln_pre = RMSNorm(config.hidden, EPS)
        self.transformer = LayerList(PixtralBlock(config) for _ in range(config.depth))

    def slices(self, patches: Tensor, grid: tuple[int, int]) -> Slices[Tensor]:
        """Encode the patches of one image, one slice at a time.

        patches: (rows * columns, channels * patch * patch), row by row.
        grid: (rows, columns) of patches.

        Returns (rows * columns, hidden * taps).
        """
        taps = self.config.taps
        x = yield from apply_by_rows(self._embed, patches)
        rotation = self._rotation(grid, x)
        runs = (((1, x.shape[0]),),)
        blocks = cast("list[PixtralBlock]", list(self.transformer.layers))
        states, before = {}, 0
        for tap in sorted(set(taps)):
            x = yield from run_blocks(blocks[before:tap], x, *rotation, runs)
            # The next blocks may change x, so a state that is read is copied, except for the last one.
            states[tap], before = (x if tap == self.config.depth else x.clone()), tap
        tapped = [states[tap] for tap in taps]
        return tapped[0] if len(tapped) == 1 else torch.cat(tapped, dim=-1)

    def shape(self, grid: tuple[int, int], projector_rows: int) -> VisualShape:
        """Count the rows that are computed for a grid (rows, columns) of patches.

        projector_rows: rows of the projector.
        """
        patches = grid[0] * grid[1]
        pairs = self.config.depth * patches**2
        return VisualShape(patches, patches, projector_rows, self.config.hidden, pairs)

    def _embed(self, patches: Tensor) -> Tensor:
        return self.ln_pre(self.patch_conv(patches))  # type: ignore[no-any-return]

    def _rotation(self, grid: tuple[int, int], x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary positions of patches, rounded to the type of x.

        Each is (patches, 1, head_dim) float32. The even frequencies of a head turn with the row of a patch,
        the odd ones with its column.
        """
        width = self.config.hidden // self.config.heads
        steps = torch.arange(0, width, 2, dtype=torch.float32, device=x.device)
        inverse = 1.0 / (self.config.theta ** (steps / width))
        rows, columns = (torch.arange(count, dtype=torch.float32, device=x.device) for count in grid)
        down = (rows[:, None] * inverse[0::2])[:, None].expand(-1, grid[1], -1)
        across = (columns[:, None] * inverse[1::2])[None].expand(grid[0], -1, -1)
        angles = torch.cat((down, across, down, across), dim=-1).flatten(0, 1)[:, None]
        return angles.cos().to(x.dtype).float(), angles.sin().to(x.dtype).float()
