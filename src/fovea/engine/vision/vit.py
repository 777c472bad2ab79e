"""The plain vision transformer of CLIP, SigLIP, Idefics3 and InternVL: tiles of a fixed size to rows.

Only the layers up to the last one that the model reads are built, loaded and run. LLaVA, for example, reads
the input of CLIP's last layer, so the last layer is not even loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.engine.layers.linear import (
    Embedding,
    FusedLinear,
    LayerList,
    LayerNorm,
    Linear,
    PatchLinear,
    PlainMLP,
    RMSNorm,
    parameter,
)
from fovea.engine.vision.calls import TileLayer, run_tiles
from fovea.engine.vision.encoding import Slices, VisualShape
from fovea.kernels.base import Kernels
from fovea.kernels.torch_kernels import PLAIN
from fovea.kernels.transfer import to_device
from fovea.planner.shape import Tower


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """Shape of a vision transformer.

    depth: number of layers that run.
    taps: hidden states that are concatenated to the output; 0 is the embeddings, n the output of the n-th
        layer.
    rms_norm: the norms inside the layers are RMSNorm, not LayerNorm.
    qkv_bias: queries, keys and values have a bias.
    qk_norm: epsilon of an RMSNorm over all heads of the queries, and of the keys; None: no such norms.
    layer_scale: what attention and MLP add to a row is multiplied by a weight per column.
    """

    hidden: int
    depth: int
    heads: int
    intermediate: int
    activation: str
    eps: float
    image_size: int
    patch_size: int
    channels: int
    class_token: bool
    patch_bias: bool
    pre_norm: bool
    post_norm: bool
    taps: tuple[int, ...]
    rms_norm: bool = False
    qkv_bias: bool = True
    qk_norm: float | None = None
    layer_scale: bool = False

    @property
    def side(self) -> int:
        return self.image_size // self.patch_size


class Embeddings(nn.Module):
    """The embedding of patches, and the table of learned positions."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        kernel = (config.channels, config.patch_size, config.patch_size)
        self.patch_embedding = PatchLinear(kernel, config.hidden, bias=config.patch_bias)
        self.position_embedding = Embedding(config.side**2 + int(config.class_token), config.hidden)
        self.class_embedding = parameter(config.hidden) if config.class_token else None

    def forward(self, pixels: Tensor, position_ids: Tensor | None) -> Tensor:
        """Embed the patches of tiles.

        pixels: (tiles, channels, H, W).
        position_ids: (tiles, patches), rows of the position table; None: the whole table in order.

        Returns (tiles, patches [+1], hidden); the first row is the class token, if the model has one.
        """
        x: Tensor = self.patch_embedding(cut_patches(pixels, self.config.patch_size))
        if self.class_embedding is not None:
            x = torch.cat((self.class_embedding.expand(len(x), 1, -1), x), dim=1)
        if position_ids is None:
            return x + self.position_embedding.weight
        return x + self.position_embedding(position_ids)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """The attention of a layer, and its projections. Its attribute names are those of the checkpoints."""

    kernels: Kernels = PLAIN

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        width = config.hidden
        outputs = {"q_proj": width, "k_proj": width, "v_proj": width}
        self.qkv = FusedLinear(width, outputs, bias=config.qkv_bias)
        self.q_norm = RMSNorm(width, config.qk_norm) if config.qk_norm is not None else None
        self.k_norm = RMSNorm(width, config.qk_norm) if config.qk_norm is not None else None
        self.out_proj = Linear(width, width, bias=True)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of rows x (..., width), normalised if the model does that."""
        qkv: Tensor = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = torch.split(qkv, x.shape[-1], dim=-1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        return qkv

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attention inside every tile, without the output projection; (tiles, length, width) in and out."""
        tiles, length, width = x.shape
        qkv = self.project(x)
        if mask is None:
            out = torch.empty_like(x).view(tiles * length, width)
            rows = qkv.view(tiles * length, 3 * self.heads, -1)
            self.kernels.attend_groups(rows, tiles, self.heads, slice(0, self.heads), out)
            out = out.view(tiles, length, width)
        else:
            q, k, v = qkv.view(tiles, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            out = out.transpose(1, 2).reshape(tiles, length, width)
        return out


class Layer(nn.Module):
    """One transformer layer: attention and MLP, each after a norm."""

    rowwise = ("before", "after")

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        norm = RMSNorm if config.rms_norm else LayerNorm
        self.layer_norm1 = norm(config.hidden, config.eps)
        self.self_attn = Attention(config)
        self.layer_norm2 = norm(config.hidden, config.eps)
        self.mlp = PlainMLP(config.hidden, config.intermediate, config.activation, ("fc1", "fc2"))
        self.layer_scale1 = parameter(config.hidden) if config.layer_scale else None
        self.layer_scale2 = parameter(config.hidden) if config.layer_scale else None

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.after(self.self_attn(self.layer_norm1(x), mask), x)

    @property
    def attention(self) -> Attention:
        return self.self_attn

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of rows x (T, hidden), not rotated: (T, 3 * heads, head_dim)."""
        qkv = self.self_attn.project(self.layer_norm1(x))
        return qkv.view(x.shape[0], 3 * self.self_attn.heads, -1)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values of rows x, rotated, for towers with rotary positions (`siglip.NaViT`)."""
        return self.self_attn.kernels.rotate(self.project(x), 2 * self.self_attn.heads, cos, sin)

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Apply the output projection, the norm and the MLP. mixed: output of the attention; x: residual.

        Both are (tiles, length, hidden) or (T, hidden).
        """
        if self.layer_scale1 is None or self.layer_scale2 is None:
            x = self.self_attn.out_proj(mixed, x)
            return self.mlp(self.layer_norm2(x), x)  # type: ignore[no-any-return]
        x = torch.addcmul(x, self.layer_scale1, self.self_attn.out_proj(mixed))
        return torch.addcmul(x, self.layer_scale2, self.mlp(self.layer_norm2(x)))


class VisionTransformer(nn.Module):
    """A vision transformer over tiles of a fixed size. Its attribute names are those of the checkpoints."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.pre_layrnorm = LayerNorm(config.hidden, config.eps) if config.pre_norm else None
        self.encoder = LayerList(Layer(config) for _ in range(config.depth))
        self.post_layernorm = LayerNorm(config.hidden, config.eps) if config.post_norm else None

    def shape(self, tiles: int, *, dropped_rows: int = 0, rows_per_token: int = 1) -> VisualShape:
        """Count the rows that are computed for a number of tiles.

        dropped_rows: rows of each tile that the projector does not get.
        rows_per_token: rows that are merged into one before the projector.
        """
        config = self.config
        patches = config.side**2
        rows = patches + int(config.class_token)
        pairs = tiles * config.depth * rows**2
        projector_rows = tiles * (rows - dropped_rows) // rows_per_token
        return VisualShape(tiles * patches, tiles * rows, projector_rows, config.hidden, pairs)

    def tower_shape(self, tile_tokens: int, *, dropped_rows: int = 0, rows_per_token: int = 1) -> Tower:
        """Return the numbers from which the rows of an image follow.

        tile_tokens: visual tokens of a tile.
        dropped_rows, rows_per_token: see `shape`.
        """
        config = self.config
        extra = int(config.class_token)
        return Tower(
            config.hidden,
            config.side**2 / tile_tokens,
            tiling="whole",
            tile_tokens=tile_tokens,
            tile_patches=config.side**2,
            extra_rows=extra,
            projected_extra_rows=extra - dropped_rows,
            full_layers=config.depth,
            projector_rows_per_patch=1 / rows_per_token,
        )

    def slices(self, pixels: Tensor, patch_mask: Tensor | None = None) -> Slices[Tensor]:
        """Encode tiles, one layer of some tiles at a time.

        pixels: (tiles, channels, H, W).
        patch_mask: bool, (tiles, rows, columns): True for the real patches of padded tiles (Idefics3).
            None: all patches are real. It is on the host.

        Returns (tiles, patches [+1], hidden * taps).
        """
        position_ids, mask = None, None
        if patch_mask is not None:
            position_ids = to_device(fractional_positions(patch_mask, self.config.side), pixels.device)
            if not bool(patch_mask.all()):
                mask = to_device(patch_mask.flatten(1)[:, None, None], pixels.device)
        x = self.embeddings(pixels, position_ids)
        if self.pre_layrnorm is not None:
            x = self.pre_layrnorm(x)
        layers, states, before = cast("list[TileLayer]", list(self.encoder.layers)), {}, 0
        for tap in sorted({*self.config.taps, self.config.depth}):
            x = states[tap] = yield from run_tiles(layers[before:tap], x, mask)
            before = tap
        tapped = [states[tap] for tap in self.config.taps]
        x = tapped[0] if len(tapped) == 1 else torch.cat(tapped, dim=-1)
        return x if self.post_layernorm is None else self.post_layernorm(x)


def fractional_positions(patch_mask: Tensor, side: int) -> Tensor:
    """Position ids (tiles, patches) of partly filled tiles.

    Each real patch takes the entry of the position table at its fraction of the tile (NaViT, arXiv
    2307.06304); all others take entry 0.

    patch_mask: bool, (tiles, rows, columns), True for real patches.
    side: rows, and columns, of the position table.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side, device=patch_mask.device)
    buckets = []
    for axis, count in ((1, patch_mask[:, :, 0].sum(1)), (2, patch_mask[:, 0, :].sum(1))):
        steps = torch.arange(patch_mask.shape[axis], dtype=torch.float32, device=patch_mask.device)
        fraction = (steps[None, :] * (1.0 / count)[:, None]).clamp(max=1.0 - 1e-6)
        buckets.append(torch.bucketize(fraction, boundaries, right=True))
    ids = buckets[0][:, :, None] * side + buckets[1][:, None, :]
    return torch.where(patch_mask, ids, 0).flatten(1)


def cut_patches(pixels: Tensor, size: int) -> Tensor:
    """Cut tiles (tiles, channels, H, W) into patches of a size, row by row; pixels of the rest are dropped.

    Returns (tiles, patches, channels * size * size).
    """
    tiles, channels, height, width = pixels.shape
    rows, columns = height // size, width // size
    pixels = pixels[:, :, : rows * size, : columns * size]
    patches = pixels.reshape(tiles, channels, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(tiles, rows * columns, -1)
