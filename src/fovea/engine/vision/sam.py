"""The image encoder of SAM (arXiv 2304.02643): windowed attention with relative positions, and a neck.

Most blocks attend inside square windows; some attend to the whole picture. The windows of a grid that they
do not divide reach beyond it. The rows there are zero before the projections, but they take part in the
attention, because queries, keys and values have a bias. After the blocks, convolutions join 4 x 4 patches
(DeepSeek-OCR, arXiv 2510.18234).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.engine.layers.linear import LayerNorm, Linear, PatchLinear, PlainMLP, parameter
from fovea.engine.vision.calls import PAIRS_PER_ROW
from fovea.engine.vision.encoding import Slices, cuts, slice_rows

NECK_EPS = 1e-6
"""Constant of the neck's norms, whatever the blocks' constant is."""
STRIDES = 2
"""Number of convolutions after the neck; each halves both sides of a picture."""


@dataclass(frozen=True, slots=True)
class SamConfig:
    """Shape of the encoder.

    side: patches along a side of the pictures that the learned positions were made for.
    patch: side of a patch, in pixels.
    window: side of a window, in patches.
    whole: numbers of the blocks that attend to the whole picture.
    neck: width of the neck.
    widths: widths after each of the convolutions that follow the neck.
    """

    hidden: int
    depth: int
    heads: int
    intermediate: int
    activation: str
    eps: float
    qkv_bias: bool
    channels: int
    side: int
    patch: int
    window: int
    whole: tuple[int, ...]
    neck: int
    widths: tuple[int, int]

    def pairs(self, side: int) -> int:
        """Pairs of rows that attend to each other in a picture of side * side patches, in all blocks."""
        windows = -(-side // self.window)
        full = len(self.whole)
        return full * side**4 + (self.depth - full) * windows**2 * self.window**4


class RelativeAttention(nn.Module):
    """Attention with a bias that depends on how many rows and columns query and key are apart.

    side: rows, and columns, of the pictures or windows that the tables were made for.
    """

    def __init__(self, config: SamConfig, side: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.hidden, 3 * config.hidden, bias=config.qkv_bias)
        self.proj = Linear(config.hidden, config.hidden, bias=True)
        shape = (2 * side - 1, config.hidden // config.heads)
        self.rel_pos_h = parameter(*shape)
        self.rel_pos_w = parameter(*shape)

    def slices(self, qkv: Tensor) -> Slices[Tensor]:
        """Attend inside each group, one slice at a time.

        A slice is some groups; of a group that is too large for one slice, it is some heads and some rows.

        qkv: (groups, side, side, 3 * hidden). Returns (groups, side, side, hidden).
        """
        groups, side = qkv.shape[:2]
        q, k, v = qkv.view(groups, side, side, 3, self.heads, -1).permute(3, 0, 4, 1, 2, 5)
        vertical, horizontal = (relative_table(t, side) for t in (self.rel_pos_h, self.rel_pos_w))
        out = torch.empty_like(q)
        pairs, per_row = slice_rows(qkv) * PAIRS_PER_ROW, side**3
        per_head = per_row * side
        for some in cuts(groups, pairs // (per_head * self.heads)):
            for heads in cuts(self.heads, pairs // per_head):
                keys, values = k[some, heads].flatten(2, 3), v[some, heads].flatten(2, 3)
                for rows in cuts(side, pairs // per_row):
                    queries = q[some, heads, rows]
                    bias = _add_tables(queries, vertical[rows], horizontal)
                    mixed = functional.scaled_dot_product_attention(
                        queries.flatten(2, 3), keys, values, attn_mask=bias
                    )
                    out[some, heads, rows] = mixed.view(queries.shape)
                    yield None
        return out.permute(0, 2, 3, 1, 4).flatten(3)


def relative_table(table: Tensor, side: int) -> Tensor:
    """Entries of a table of relative positions for each pair of lines: (side, side, head_dim).

    Rows are queries, columns are keys. A table for another side is resampled linearly.

    table: (2 * its side - 1, head_dim), from the largest negative distance to the largest positive one.
    """
    count = 2 * side - 1
    if len(table) != count:
        resized = functional.interpolate(table.T[None].float(), size=count, mode="linear")
        table = resized[0].T.to(table.dtype)
    lines = torch.arange(side, device=table.device)
    return table[lines[:, None] - lines + side - 1]


def _add_tables(queries: Tensor, vertical: Tensor, horizontal: Tensor) -> Tensor:
    """Biases of the scores, (groups, heads, queries, keys).

    queries: (groups, heads, rows, side, head_dim), not scaled.
    vertical: (rows, side, head_dim). horizontal: (side, side, head_dim).
    """
    down = torch.einsum("ghrcd,rkd->ghrck", queries, vertical)
    across = torch.einsum("ghrcd,ckd->ghrck", queries, horizontal)
    return (down[..., :, None] + across[..., None, :]).flatten(4).flatten(2, 3)


class SamBlock(nn.Module):
    """One block: attention and MLP, each after a norm. Its attribute names are those of the checkpoints.

    window: side of the windows; 0: the block attends to the whole picture.
    """

    rowwise = ("before", "after")

    def __init__(self, config: SamConfig, window: int) -> None:
        super().__init__()
        self.window = window
        self.layer_norm1 = LayerNorm(config.hidden, config.eps)
        self.attn = RelativeAttention(config, window or config.side)
        self.layer_norm2 = LayerNorm(config.hidden, config.eps)
        self.mlp = PlainMLP(config.hidden, config.intermediate, config.activation, ("lin1", "lin2"))

    def slices(self, x: Tensor) -> Slices[Tensor]:
        """Compute the block. x (pictures, side, side, hidden), contiguous, is changed and returned."""
        rows = x.flatten(0, 2)
        qkv = rows.new_empty((len(rows), 3 * rows.shape[1]))
        for some in cuts(len(rows), slice_rows(x)):
            qkv[some] = self.before(rows[some])
            yield None
        qkv = qkv.view(*x.shape[:3], -1)
        if self.window:
            mixed = yield from self.attn.slices(self._cut(qkv))
            mixed = self._join(mixed, x.shape[1])
        else:
            mixed = yield from self.attn.slices(qkv)
        mixed = mixed.flatten(0, 2)
        for some in cuts(len(rows), slice_rows(x)):
            rows[some] = self.after(mixed[some], rows[some])
            yield None
        return x

    def before(self, x: Tensor) -> Tensor:
        """Queries, keys and values of rows x (T, hidden)."""
        return self.attn.qkv(self.layer_norm1(x))  # type: ignore[no-any-return]

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Apply output projection, norm and MLP to attention output `mixed` of rows x, both (T, hidden)."""
        x = self.attn.proj(mixed, x)
        return self.mlp(self.layer_norm2(x), x)  # type: ignore[no-any-return]

    def _cut(self, qkv: Tensor) -> Tensor:
        """Cut (pictures, side, side, width) into windows, (windows, window, window, width)."""
        pictures, side, _, width = qkv.shape
        count, bias = -(-side // self.window), self.attn.qkv.bias
        padded = count * self.window
        # The projection of a zero row is the bias.
        whole = qkv.new_zeros((pictures, padded, padded, width))
        if bias is not None:
            whole += bias.to(qkv.dtype)
        whole[:, :side, :side] = qkv
        cut = whole.view(pictures, count, self.window, count, self.window, width)
        return cut.transpose(2, 3).reshape(-1, self.window, self.window, width)

    def _join(self, windows: Tensor, side: int) -> Tensor:
        """The inverse of `_cut`."""
        count, width = -(-side // self.window), windows.shape[-1]
        cut = windows.view(-1, count, count, self.window, self.window, width).transpose(2, 3)
        padded = count * self.window
        return cut.reshape(-1, padded, padded, width)[:, :side, :side]


class _Convolution(nn.Module):
    """A convolution of 3 x 3 with a border of zeros and without a bias."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, 3, 3)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map (pictures, rows, columns, inputs); the result has the same layout."""
        y = functional.conv2d(x.permute(0, 3, 1, 2), self.weight, stride=self.stride, padding=1)
        return y.permute(0, 2, 3, 1)


class _Neck(nn.Module):
    """Two convolutions, each before a norm."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.conv1 = PatchLinear((config.hidden, 1, 1), config.neck, bias=False)
        self.layer_norm1 = LayerNorm(config.neck, NECK_EPS)
        self.conv2 = _Convolution(config.neck, config.neck, 1)
        self.layer_norm2 = LayerNorm(config.neck, NECK_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm2(self.conv2(self.layer_norm1(self.conv1(x))))  # type: ignore[no-any-return]


class _Shrinking(nn.Module):
    """Two convolutions of stride 2."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.conv1 = _Convolution(config.neck, config.widths[0], 2)
        self.conv2 = _Convolution(*config.widths, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv1(x))  # type: ignore[no-any-return]


class _PatchEmbedding(nn.Module):
    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.patch = config.patch
        kernel = (config.channels, config.patch, config.patch)
        self.projection = PatchLinear(kernel, config.hidden, bias=True)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed the patches of pictures (n, channels, height, width): (n, rows, columns, hidden)."""
        count, channels, height, width = pixels.shape
        rows, columns = height // self.patch, width // self.patch
        cut = pixels.view(count, channels, rows, self.patch, columns, self.patch)
        patches = cut.permute(0, 2, 4, 1, 3, 5).reshape(count, rows, columns, -1)
        return self.projection(patches)  # type: ignore[no-any-return]


class SamEncoder(nn.Module):
    """The encoder. Its attribute names are those of the checkpoints."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = _PatchEmbedding(config)
        table = (1, config.side, config.side, config.hidden)
        self.pos_embed = parameter(*table)
        self.layers = nn.ModuleList(
            SamBlock(config, 0 if number in config.whole else config.window) for number in range(config.depth)
        )
        self.neck = _Neck(config)
        self.proj = _Shrinking(config)

    def slices(self, pixels: Tensor) -> Slices[Tensor]:
        """Encode square pictures of one size, one slice at a time.

        pixels: (pictures, channels, edge, edge).

        Returns (pictures, rows, widths[1]), where the rows are the picture's 4 x 4 squares of patches.
        """
        parts = []
        positions = self._positions(pixels.shape[-1] // self.config.patch)
        for one in cuts(len(pixels), 1):
            parts.append(self.patch_embed(pixels[one]) + positions)
            yield None
        x = torch.cat(parts)
        for block in self.layers:
            x = yield from cast("SamBlock", block).slices(x)
        outputs = []
        for one in cuts(len(x), 1):
            outputs.append(self.proj(self.neck(x[one])).flatten(1, 2))
            yield None
        return torch.cat(outputs)

    def _positions(self, side: int) -> Tensor:
        """Learned positions for a picture of side * side patches, (1, side, side, hidden)."""
        if side == self.config.side:
            return self.pos_embed
        table = self.pos_embed.permute(0, 3, 1, 2).float()
        resized = functional.interpolate(table, (side, side), mode="bicubic", antialias=True)
        return resized.permute(0, 2, 3, 1).to(self.pos_embed.dtype)
