"""The transformer block of Qwen's and GLM-4V's towers. Its attribute names are those of their checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fovea.engine.layers.linear import Linear
from fovea.engine.vision.any_size import block_slices
from fovea.engine.vision.slices import Slices
from fovea.kernels.base import Kernels
from fovea.kernels.torch_kernels import PLAIN


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

    def slices(self, x: Tensor, cos: Tensor, sin: Tensor, runs: Sequence[tuple[int, int]]) -> Slices[Tensor]:
        """Compute the block one slice at a time, see `block_slices`."""
        return block_slices(self, x, cos, sin, runs)

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
