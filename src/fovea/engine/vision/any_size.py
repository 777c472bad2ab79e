"""The interface of vision towers that take pictures of any size, and what their blocks have in common.

Such a tower has rotary positions in two dimensions: half of the angles turn with a patch's row, half with its
column. Patches come in merge order: those that become one visual token are neighbours in the list.

Some of these towers also have learned positions, which `PositionTable` interpolates to each picture's grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fovea.engine.layers.linear import Embedding, Linear
from fovea.engine.vision.calls import RotaryBlock, run_blocks
from fovea.engine.vision.encoding import Slices, VisualShape, cuts, run_to_end, slice_rows
from fovea.engine.vision.processor.sizes import Index, patch_coordinates
from fovea.kernels.base import Kernels
from fovea.kernels.torch_kernels import PLAIN
from fovea.kernels.transfer import to_device
from fovea.planner.shape import Tower

Weights = NDArray[np.float32]
MAX_GRIDS = 64
"""Most grids whose positions are kept on the device."""
KEYS = -0.75
"""Parameter of the bicubic kernel of Keys, as in torch's and PIL's arithmetic on pictures."""
At = NDArray[np.float32] | None
"""Places of patches in the whole image, see `AnySizeTower.slices`."""


class AnySizeTower(Protocol):
    """A vision tower, with its projector, that encodes pictures of any size."""

    @property
    def merge(self) -> int:
        """Patches per side of a visual token."""
        ...

    @property
    def crop_invariant(self) -> bool:
        """Whether a crop's tokens are independent of its place in the image: no position was learned."""
        ...

    @property
    def corners(self) -> bool:
        """How learned positions lie on an image, see `PositionTable`. Without such positions it is True."""
        ...

    @property
    def patch_weight(self) -> Tensor:
        """The weight of the patch embedding, on the tower's device."""
        ...

    def slices(
        self, patches: Tensor, grid: tuple[int, int, int], at: NDArray[np.float32] | None = None
    ) -> Slices[tuple[Tensor, list[Tensor]]]:
        """Encode the patches of one image, or of t frames or crops of equal size, one slice at a time.

        Patches attend only to patches of their own frame or crop.

        patches: (t*h*w, values), in merge order.
        grid: (t, h, w) in patches.
        at: places of the patches of t crops in the whole image: (t*h*w, 2) fractions in [0, 1], in merge
            order. None: each of the t is a whole image or frame.

        Returns visual tokens (t*h*w/merge^2, decoder width), and one such tensor for each DeepStack level.
        """
        ...

    def tap(self, patches: Tensor, grid: tuple[int, int, int]) -> TappedAttention:
        """Return the attention inputs of the last block in which all patches of a frame attend to each other.

        patches, grid: as for `slices`. The tower runs up to that block.
        """
        ...


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A square table of learned positions, and how a grid of another size reads it.

    side: rows, and columns, of the table.
    corners: how table and grid lie on each other. True: the centres of their first and last entries coincide
        (torch's `align_corners`). False: their outer edges coincide.
    cubic: bicubic interpolation of 16 entries per patch; otherwise bilinear of 4. Entries beyond the edge are
        those at the edge.
    """

    side: int
    corners: bool
    cubic: bool = False

    def taps(self, grid: tuple[int, int, int], merge: int) -> tuple[Index, Weights]:
        """Return the entries that each patch of a grid (t, h, w) reads, and their weights.

        Both are (t * h * w, 4 or 16), in merge order. The weights of a patch sum to 1.
        """
        coordinates = patch_coordinates(grid, merge).astype(np.float32)
        if self.corners:
            last = np.array((max(grid[1] - 1, 1), max(grid[2] - 1, 1)), np.float32)
            return self._taps(coordinates * np.float32(self.side - 1) / last)
        size, half = np.array(grid[1:], np.float32), np.float32(0.5)
        return self._taps((coordinates + half) * np.float32(self.side) / size - half)

    def taps_at(self, fractions: Weights) -> tuple[Index, Weights]:
        """Return the entries and weights for patches at any places of a picture.

        fractions: (patches, 2) in [0, 1], as in `realizing.patch_fractions` with this `corners`.
        """
        if self.corners:
            return self._taps(fractions * np.float32(self.side - 1))
        return self._taps(fractions * np.float32(self.side) - np.float32(0.5))

    def _taps(self, positions: Weights) -> tuple[Index, Weights]:
        """positions: (patches, 2), in units of the table's entries."""
        taps, weights = [], []
        offsets = np.arange(-1, 3) if self.cubic else np.arange(2)
        for position in positions.T:
            floor = np.floor(position).astype(np.int64)
            fraction = position - floor.astype(np.float32)
            taps.append(np.clip(floor[:, None] + offsets, 0, self.side - 1))
            weights.append(_cubic(fraction) if self.cubic else np.stack((1 - fraction, fraction), axis=1))
        count = len(offsets) ** 2
        index = (taps[0][:, :, None] * self.side + taps[1][:, None, :]).reshape(-1, count)
        weight = (weights[0][:, :, None] * weights[1][:, None, :]).reshape(-1, count)
        return index, weight.astype(np.float32)


def _cubic(fraction: Weights) -> Weights:
    """Weights (patches, 4) of the two entries before and the two after a point, by Keys' kernel.

    fraction: (patches,), distance of the point from the entry before it.
    """
    columns = []
    for distance in (fraction + 1, fraction, 1 - fraction, 2 - fraction):
        near = ((KEYS + 2) * distance - (KEYS + 3)) * distance * distance + 1
        far = ((KEYS * distance - 5 * KEYS) * distance + 8 * KEYS) * distance - 4 * KEYS
        columns.append(np.where(distance <= 1, near, far))
    return np.stack(columns, axis=1).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class TappedAttention:
    """Inputs of the attention in one block, for all patches of an image in the tower's own order.

    query, key: (patches, heads, head_dim), rotated.
    plain_key: (patches, head_dim) float32, keys before the rotation, mean over heads.
    back: (tokens,), where each visual token in merge order is in the tower's order; None: the orders are
        equal.
    """

    query: Tensor
    key: Tensor
    plain_key: Tensor
    back: Tensor | None = None


def patch_angles(grid: tuple[int, int, int], merge: int, head_dim: int, theta: float) -> Tensor:
    """Rotary angles of all patches of a grid (t, h, w), (patches, 1, head_dim) float32, in merge order.

    head_dim: width of a head, a multiple of 4.
    theta: base of the frequencies.
    """
    half = head_dim // 2
    inverse = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))
    coordinates = torch.from_numpy(patch_coordinates(grid, merge)).float()
    angles = (coordinates[:, :, None] * inverse).flatten(1)
    return torch.cat((angles, angles), dim=-1)[:, None]


def add_positions(x: Tensor, table: Embedding, taps: Tensor, weights: Tensor) -> Slices[Tensor]:
    """Add interpolated learned positions to rows x (patches, hidden), which are changed and returned.

    taps: (patches, n), entries of the table that each patch interpolates.
    weights: (patches, n, 1), the weights of these entries.
    """
    for rows in cuts(x.shape[0], 4 * slice_rows(x) // taps.shape[1]):
        learned = (table(taps[rows]) * weights[rows]).sum(1)
        x[rows] += learned.to(x.dtype)
        yield None
    return x


def tap_block(
    block: RotaryBlock, x: Tensor, cos: Tensor, sin: Tensor, back: Tensor | None = None
) -> TappedAttention:
    """Return the attention inputs of a block for its input x (patches, hidden). back: see TappedAttention."""
    heads = block.attention.heads
    qkv = block.project(x)
    plain = qkv[:, heads : 2 * heads].float().mean(1)
    rotated = block.attention.kernels.rotate(qkv, 2 * heads, cos, sin)
    return TappedAttention(rotated[:, :heads], rotated[:, heads : 2 * heads], plain, back)


class BlockProjections(nn.Module):
    """The projections before and after the attention of a block."""

    kernels: Kernels = PLAIN

    def __init__(self, hidden: int, heads: int, *, qkv_bias: bool, out_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(hidden, 3 * hidden, bias=qkv_bias)
        self.proj = Linear(hidden, hidden, bias=out_bias)


class Block(nn.Module):
    """One transformer block of a tower with rotary positions: attention and MLP, each after a norm.

    norm: makes a norm of the width `hidden`.
    mlp: a feed-forward block, called with rows and residual.
    qkv_bias, out_bias: whether the projections before and after the attention have a bias.
    """

    rowwise = ("before", "after")

    def __init__(
        self,
        hidden: int,
        heads: int,
        norm: Callable[[], nn.Module],
        mlp: nn.Module,
        *,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        self.norm1 = norm()
        self.attn = BlockProjections(hidden, heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.norm2 = norm()
        self.mlp = mlp

    @property
    def attention(self) -> BlockProjections:
        return self.attn

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of rows x (T, hidden), not rotated: (T, 3 * heads, head_dim)."""
        qkv: Tensor = self.attn.qkv(self.norm1(x))
        return qkv.view(x.shape[0], 3 * self.attn.heads, -1)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values of rows x, queries and keys rotated."""
        return self.attn.kernels.rotate(self.project(x), 2 * self.attn.heads, cos, sin)

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Apply output projection, norm and MLP to attention output `mixed` of rows x, both (T, hidden)."""
        attended = self.attn.proj(mixed, x)
        return self.mlp(self.norm2(attended), attended)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Positions of patches and passes through the blocks.

    Such a tower has learned positions, which are interpolated to each picture's grid, and rotary ones.

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
        if at is None:
            index, weight = _taps(self.table, grid, self.merge, x.device)
        else:
            index, weight = tap_tensors(self.table.taps_at(at), x.device)
        return (yield from add_positions(x, entries, index, weight))

    def run(self, blocks: Sequence[RotaryBlock], x: Tensor, grid: tuple[int, int, int]) -> Slices[Tensor]:
        """Compute blocks. x (patches, hidden) may be changed."""
        cos, sin = _rotary(grid, self.merge, self.head_dim, self.theta, x.device)
        return (yield from run_blocks(blocks, x, cos, sin, (((grid[0], grid[1] * grid[2]),),)))

    def tap(self, blocks: Sequence[RotaryBlock], x: Tensor, grid: tuple[int, int, int]) -> TappedAttention:
        """Compute all blocks but the last, and return the attention inputs of the last one."""
        x = run_to_end(self.run(blocks[:-1], x, grid))
        return tap_block(blocks[-1], x, *_rotary(grid, self.merge, self.head_dim, self.theta, x.device))

    def shape(self, grid: tuple[int, int, int], depth: int) -> VisualShape:
        """Count the rows that `depth` blocks compute for a grid (t, h, w). Any thread may call it."""
        frame = grid[1] * grid[2]
        patches, hidden = grid[0] * frame, self.heads * self.head_dim
        return VisualShape(patches, patches, patches // self.merge**2, hidden, depth * grid[0] * frame**2)

    def tower_shape(self, depth: int) -> Tower:
        """Return the numbers from which the rows of an image follow."""
        merged, hidden = self.merge**2, self.heads * self.head_dim
        return Tower(hidden, merged, full_layers=depth, projector_rows_per_patch=1 / merged)


@lru_cache(MAX_GRIDS)
def _rotary(
    grid: tuple[int, int, int], merge: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `patch_angles`."""
    angles = patch_angles(grid, merge, head_dim, theta)
    return to_device(angles.cos(), device), to_device(angles.sin(), device)


@lru_cache(MAX_GRIDS)
def _taps(
    table: PositionTable, grid: tuple[int, int, int], merge: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    return tap_tensors(table.taps(grid, merge), device)


def tap_tensors(taps: tuple[Index, Weights], device: torch.device) -> tuple[Tensor, Tensor]:
    """Entries (patches, n) and weights (patches, n, 1) of a `PositionTable` on a device."""
    index, weights = map(torch.from_numpy, taps)
    return to_device(index, device), to_device(weights[:, :, None], device)
