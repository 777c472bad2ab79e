"""The interface of vision towers that take pictures of any size, and what their blocks have in common.

Such a tower has rotary positions in two dimensions: half of the angles turn with a patch's row, half with its
column. Patches come in merge order: those that become one visual token are neighbours in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.layers.linear import Embedding
from fovea.engine.vision.slices import Slices, attend_slices, cuts, slice_rows
from fovea.engine.vision.windows import patch_coordinates
from fovea.kernels.base import Kernels


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


class BlockAttention(Protocol):
    """The parts of a block's attention that `block_slices` reads."""

    heads: int
    kernels: Kernels


class RotaryBlock(Protocol):
    """One transformer block with rotary positions, as the steps before and after its attention."""

    @property
    def attention(self) -> BlockAttention: ...

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of rows x (T, hidden), not rotated: (T, 3 * heads, head_dim)."""
        ...

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values of rows x, queries and keys rotated."""
        ...

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Apply output projection, norm and MLP to attention output `mixed` of rows x, both (T, hidden)."""
        ...


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
        yield
    return x


def block_slices(
    block: RotaryBlock, x: Tensor, cos: Tensor | None, sin: Tensor | None, runs: Sequence[tuple[int, int]]
) -> Slices[Tensor]:
    """Compute a block one slice at a time. x (patches, hidden) is changed in place and returned.

    cos, sin: (patches, 1, head_dim) float32; None: the tower has no rotary positions.
    runs: (groups, patches per group) that attend to each other, from the first patch on.
    """
    heads, kernels = block.attention.heads, block.attention.kernels
    qkv = x.new_empty((x.shape[0], 3 * heads, x.shape[1] // heads))
    for rows in cuts(x.shape[0], slice_rows(x)):
        if cos is None or sin is None:
            qkv[rows] = block.project(x[rows])
        else:
            qkv[rows] = block.before(x[rows], cos[rows], sin[rows])
        yield
    mixed = yield from attend_slices(kernels, qkv, runs, heads)
    for rows in cuts(x.shape[0], slice_rows(x)):
        x[rows] = block.after(mixed[rows], x[rows])
        yield
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
