"""The vision tower of Llama 3.2 Vision (mllama): a local and a gated global transformer over all tiles.

The tower has room for a fixed number of tiles. An image with fewer tiles is completed by tiles of padding,
and each tile by a few rows of zeros, up to a multiple of ROW_MULTIPLE. The model was trained so that padding
takes part: rows of the image attend to all rows, rows of padding attend to rows of the image only. So the
result of an image depends on its padding, and every image costs as much as one with all tiles.

Rows of the image are kept before rows of padding. Then each kind of row attends to one range of rows, and no
mask is needed. Source: "The Llama 3 Herd of Models" (arXiv 2407.21783), section 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.engine.layers.linear import (
    Embedding,
    FusedLinear,
    LayerNorm,
    Linear,
    PatchLinear,
    PlainMLP,
    parameter,
)
from fovea.engine.vision.calls import PAIRS_PER_ROW, apply_by_rows
from fovea.engine.vision.encoding import Slices, VisualShape, cuts, slice_rows
from fovea.engine.vision.vit import cut_patches
from fovea.planner.shape import Tower

ROW_MULTIPLE = 8
"""The rows of a tile are completed to a multiple of this."""
OUTER_EPS = 1e-5
"""Epsilon of the norms before and after the local transformer, whatever `norm_eps` is."""


@dataclass(frozen=True, slots=True)
class MllamaVisionConfig:
    """Shape of the tower.

    depth, global_depth: number of layers of the local and of the global transformer.
    eps: epsilon of the norms inside the layers.
    image_size: edge of a tile, in pixels.
    tiles: the number of tiles for which the tower has room.
    grids: the number of grids of tiles that the tables know.
    taps: layers of the local transformer, from 0, whose output is a part of the tower's output.
    """

    hidden: int
    depth: int
    global_depth: int
    heads: int
    intermediate: int
    activation: str
    eps: float
    image_size: int
    patch_size: int
    channels: int
    tiles: int
    grids: int
    taps: tuple[int, ...]

    @property
    def patches(self) -> int:
        """Patches of a tile."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: its patches and the class token."""
        return self.patches + 1

    @property
    def rows(self) -> int:
        """Rows of the layers, padding included, the same number for every image."""
        return self.tiles * -(-self.tile_rows // ROW_MULTIPLE) * ROW_MULTIPLE

    @property
    def width(self) -> int:
        """Width of the output."""
        return self.hidden * (1 + len(self.taps))


class _Attention(nn.Module):
    """The projections of a layer's attention. The attribute names are those of the checkpoints."""

    def __init__(self, config: MllamaVisionConfig) -> None:
        super().__init__()
        width = config.hidden
        self.qkv = FusedLinear(width, dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), bias=False)
        self.o_proj = Linear(width, width, bias=False)


class _Layer(nn.Module):
    """One transformer layer.

    gated: what attention and MLP add to a row is multiplied by the tangent of a learned number.
    """

    rowwise = ("before", "after")

    def __init__(self, config: MllamaVisionConfig, *, gated: bool) -> None:
        super().__init__()
        self.heads = config.heads
        self.input_layernorm = LayerNorm(config.hidden, config.eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LayerNorm(config.hidden, config.eps)
        self.mlp = PlainMLP(config.hidden, config.intermediate, config.activation, ("fc1", "fc2"))
        self.gate_attn = parameter(1) if gated else None
        self.gate_ffn = parameter(1) if gated else None

    def before(self, x: Tensor) -> Tensor:
        """Queries, keys and values of rows x (T, hidden): (T, 3 * hidden)."""
        return self.self_attn.qkv(self.input_layernorm(x))  # type: ignore[no-any-return]

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Apply the output projection, the norm and the MLP. mixed: output of the attention; x: residual."""
        if self.gate_attn is None or self.gate_ffn is None:
            x = self.self_attn.o_proj(mixed, x)
            return self.mlp(self.post_attention_layernorm(x), x)  # type: ignore[no-any-return]
        x = torch.addcmul(x, self.gate_attn.tanh(), self.self_attn.o_proj(mixed))
        return torch.addcmul(x, self.gate_ffn.tanh(), self.mlp(self.post_attention_layernorm(x)))

    def slices(self, x: Tensor, real: int) -> Slices[Tensor]:
        """Compute the layer for all rows x (T, hidden). The first `real` rows are the image's."""
        qkv = yield from apply_by_rows(self.before, x)
        mixed = yield from _attend(qkv.view(x.shape[0], 3, self.heads, -1), real)
        outputs = []
        for rows in cuts(x.shape[0], slice_rows(x)):
            outputs.append(self.after(mixed[rows], x[rows]))
            yield None
        return torch.cat(outputs)


def _attend(qkv: Tensor, real: int) -> Slices[Tensor]:
    """Attention of the first `real` rows to all rows, and of the other rows to the first `real` ones.

    qkv: (T, 3, heads, head_dim). Returns (T, heads * head_dim).
    """
    total, _, heads, _ = qkv.shape
    q, k, v = qkv.permute(1, 2, 0, 3).unsqueeze(1)
    out = qkv.new_empty(total, q.shape[-1] * heads)
    at_once = slice_rows(qkv) * PAIRS_PER_ROW // (total * heads)
    for first, last, seen in ((0, real, total), (real, total, real)):
        for part in cuts(last - first, at_once):
            rows = slice(first + part.start, first + part.stop)
            mixed = functional.scaled_dot_product_attention(q[:, :, rows], k[:, :, :seen], v[:, :, :seen])
            out[rows] = mixed[0].transpose(0, 1).flatten(1)
            yield None
    return out


class _Transformer(nn.Module):
    """A stack of layers, under the attribute name of the checkpoints."""

    def __init__(self, config: MllamaVisionConfig, depth: int, *, gated: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config, gated=gated) for _ in range(depth))

    def __iter__(self) -> Iterator[_Layer]:
        return iter(cast("list[_Layer]", list(self.layers)))


class _TileEmbedding(nn.Module):
    """A learned row per grid of tiles and place of a tile in it, multiplied by the tangent of a gate."""

    def __init__(self, config: MllamaVisionConfig) -> None:
        super().__init__()
        self.embedding = Embedding(config.grids + 1, config.tiles * config.hidden)
        self.gate = parameter(1)

    def forward(self, grid_id: Tensor) -> Tensor:
        """Return one row per tile, as one vector (tiles * hidden,). grid_id: see `MllamaTower.slices`."""
        return self.embedding(grid_id)[0] * self.gate.tanh()  # type: ignore[no-any-return]


class _PositionEmbedding(nn.Module):
    """Learned positions inside a tile, and learned positions in all tiles of a grid. A gate blends them."""

    def __init__(self, config: MllamaVisionConfig) -> None:
        super().__init__()
        self.embedding = parameter(config.tile_rows, config.hidden)
        self.tile_embedding = Embedding(config.grids + 1, config.tiles * config.tile_rows * config.hidden)
        self.gate = parameter(1)

    def forward(self, x: Tensor, grid_id: Tensor) -> Tensor:
        """Add the positions to x (tiles, rows, hidden)."""
        blend = self.gate.tanh()
        x = x + (1 - blend) * self.embedding
        return torch.addcmul(x, blend, self.tile_embedding(grid_id).view(x.shape))


class MllamaTower(nn.Module):
    """The tower without its projector. Its attribute names are those of the checkpoints."""

    def __init__(self, config: MllamaVisionConfig) -> None:
        super().__init__()
        self.config = config
        kernel = (config.channels, config.patch_size, config.patch_size)
        self.patch_embedding = PatchLinear(kernel, config.hidden, bias=False)
        self.class_embedding = parameter(config.hidden)
        self.gated_positional_embedding = _PositionEmbedding(config)
        self.pre_tile_positional_embedding = _TileEmbedding(config)
        self.post_tile_positional_embedding = _TileEmbedding(config)
        self.layernorm_pre = LayerNorm(config.hidden, OUTER_EPS)
        self.layernorm_post = LayerNorm(config.hidden, OUTER_EPS)
        self.transformer = _Transformer(config, config.depth, gated=False)
        self.global_transformer = _Transformer(config, config.global_depth, gated=True)

    def slices(self, pixels: Tensor, grid_id: Tensor) -> Slices[Tensor]:
        """Encode an image, one slice at a time.

        pixels: (tiles, channels, H, W), without tiles of padding.
        grid_id: int64 (1,), the number of the grid of tiles among all grids, from 1.

        Returns (config.tiles * tile_rows, config.width). The rows of the image come first, tile by tile, and
        after them those of the tiles of padding. Columns: the last output, then for each column of the layers
        its values after each layer of `taps`.
        """
        config = self.config
        kept, real = config.tiles * config.tile_rows, pixels.shape[0] * config.tile_rows
        x = yield from self._embed(pixels, grid_id)
        x = functional.pad(x.flatten(0, 1), (0, 0, 0, config.rows - kept))
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self.transformer):
            x = yield from layer.slices(x, real)
            if index in config.taps:
                taps[index] = x[:kept]
        x = yield from apply_by_rows(self.layernorm_post, x)
        x = x + self._tile_rows(self.post_tile_positional_embedding(grid_id))
        for layer in self.global_transformer:
            x = yield from layer.slices(x, real)
        tapped = torch.stack([taps[tap] for tap in config.taps], dim=-1).flatten(1)
        return torch.cat((x[:kept], tapped), dim=-1)

    def shape(self, tiles: int) -> VisualShape:
        """Count the rows that are computed for an image. Any thread may call it.

        tiles: tiles of the image, without padding. Only their rows are projected.
        """
        config = self.config
        real = tiles * config.tile_rows
        pairs = 2 * real * config.rows - real**2
        depth = config.depth + config.global_depth
        return VisualShape(tiles * config.patches, config.rows, real, config.hidden, depth * pairs)

    def tower_shape(self) -> Tower:
        """Return the numbers from which the rows of an image follow."""
        config = self.config
        return Tower(
            config.hidden,
            1.0,
            tiling="whole",
            tile_tokens=config.tile_rows,
            tile_patches=config.patches,
            extra_rows=1,
            projected_extra_rows=1,
            padded_rows=config.rows,
            full_layers=config.depth + config.global_depth,
        )

    def _embed(self, pixels: Tensor, grid_id: Tensor) -> Slices[Tensor]:
        """Rows of all tiles before the first layer, (tiles, tile_rows, hidden)."""
        config, tiles = self.config, len(pixels)
        patches = cut_patches(pixels, config.patch_size).flatten(0, 1)
        rows = yield from apply_by_rows(self.patch_embedding, patches)
        # The pixels of a tile of padding are zeros, and so are its patches: the embedding has no bias.
        x = functional.pad(rows, (0, 0, 0, (config.tiles - tiles) * config.patches))
        x = x.view(config.tiles, config.patches, config.hidden)
        x = x + self.pre_tile_positional_embedding(grid_id).view(config.tiles, 1, config.hidden)
        x = torch.cat((self.class_embedding.expand(config.tiles, 1, -1), x), dim=1)
        x = self.gated_positional_embedding(x, grid_id)
        yield None
        return self.layernorm_pre(x)  # type: ignore[no-any-return]

    def _tile_rows(self, embedding: Tensor) -> Tensor:
        """Repeat the row of each tile for all of the tile's rows, in the order of the layers: (T, hidden)."""
        config = self.config
        rows = embedding.view(config.tiles, config.hidden)
        padding = config.rows // config.tiles - config.tile_rows
        return torch.cat([rows.repeat_interleave(count, dim=0) for count in (config.tile_rows, padding)])
