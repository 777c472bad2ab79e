"""The interface between layers and kernels: what a set of kernels computes, and the shapes of everything.

A layer holds the set that `choose` picked for the model, and never asks which one it is. `torch.kernels.TorchKernels` can
do everything everywhere. A faster set implements what it does better and delegates the rest to a TorchKernels that it
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fovea.kernels.attention import AttentionPlan
from fovea.kernels.quantize import Format

Product = Callable[[Tensor, Tensor | None], Tensor]
"""x (..., in) and a residual (..., out) or None to y (..., out), bias and activation included."""
Stack = Callable[[Tensor, int, int, Tensor, Tensor, Tensor, AttentionPlan], Tensor]
"""x (T, hidden) through layers first..last-1. Arguments: x, first, last, cos, sin, kv of all layers, plan."""


class TableProduct(Protocol):
    """A product whose weight can also be read by row."""

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor: ...

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, (*ids, in)."""


@dataclass(frozen=True, slots=True)
class StackShape:
    """Sizes that all layers of a decoder share. eps: of the norms; scale: of the attention scores."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class StackLayer:
    """Norm weights and products of one decoder layer; gate and up are one product. None: the layer has no such part."""

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Product | None
    out: Product | None
    gate_up: Product | None
    down: Product | None


class Kernels(Protocol):
    """One set of kernels.

    least_shared_rows: fewer rows that begin with the same blocks read them each for itself.
    """

    @property
    def least_shared_rows(self) -> int: ...

    @property
    def plain(self) -> bool:
        """Whether everything is torch with plain weights, so that torch can compile the layers."""
        ...

    def product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool
    ) -> Product | None:
        """A product with a copy of `weight` (out, in) in the kernels' own layout; None: use the weight as it is."""
        ...

    def quantized(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, format: Format
    ) -> TableProduct:
        """A product with a copy of `weight` (out, in) rounded to the format."""
        ...

    def stack(self, shape: StackShape, layers: Sequence[StackLayer]) -> Stack | None:
        """A run of decoder layers as one call; None: the layers are called one by one."""
        ...

    def attends_in_place(self, head_dim: int) -> bool:
        """Whether decodes read pages in place. Otherwise they are grouped by length and masked."""
        ...

    def shared_rows(self, group: int) -> int:
        """How many rows at most read blocks that all of them begin with once, together; 0: every row reads its own.

        group: query heads per KV head.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rotate(self, x: Tensor, turned: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of the first `turned` heads of x (T, H, D), in place; cos, sin (T, 1, D) float32."""
        ...

    def rotate_store(
        self,
        qkv: Tensor,
        heads: int,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        kv: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values, return the queries (T, heads, D).

        qkv (T, heads + 2 * kv_heads, D); norms: weights (D,) of queries and keys; kv (blocks, block_size, 2, kv_heads, D);
        slots (T,): where each token's keys and values go.
        """
        ...

    def attend(self, query: Tensor, kv: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """Attention of query (T, H, D) over kv as planned; returns (T, H, D)."""
        ...

    def attend_groups(self, qkv: Tensor, groups: int, heads: int, part: slice, out: Tensor) -> None:
        """Attention within `groups` groups of equally many rows, for the heads in `part`. Every row attends to its whole
        group.

        qkv (T, 3 * heads, D), queries before keys before values; out (T, heads * D), of which `part` is written.
        """
        ...
