"""What layers ask of a machine, done by torch: the kernels that run everywhere.

A faster set overrides what it does better and leaves the rest to this one; layers hold the set that was chosen for
them and never ask which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fovea.core.hardware import native_kernels_allowed
from fovea.kernels import reference
from fovea.kernels.activation import finish
from fovea.kernels.attention import AttentionPlan, attend, store
from fovea.kernels.fp8 import FP8, Fp8Product
from fovea.kernels.quantize import Format, TorchQuantizedProduct

Product = Callable[[Tensor, Tensor | None], Tensor]
"""x (..., in) and a residual (..., out) or None to y (..., out), bias and activation included."""


class TableProduct(Protocol):
    """A product whose weight can be read by row as well."""

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor: ...

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, (*ids, in)."""


Stack = Callable[[Tensor, int, int, Tensor, Tensor, Tensor, AttentionPlan], Tensor]
"""x (T, hidden) through layers first..last-1: x, first, last, cos, sin, kv of all layers, plan."""


@dataclass(frozen=True, slots=True)
class StackShape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class StackLayer:
    """Norm weights and products of a decoder layer, gate and up in one; q_norm and k_norm where there are any."""

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Product | None
    out: Product | None
    gate_up: Product | None
    down: Product | None


class TorchKernels:
    def __init__(self, *, pack: bool = False) -> None:
        """pack: let oneDNN keep weights in the layout that it multiplies fastest (CPU)."""
        self._pack = pack

    @property
    def plain(self) -> bool:
        """Whether all of it is torch, weights as it keeps them, so that torch can compile what layers do."""
        return type(self) is TorchKernels and not self._pack

    def product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool
    ) -> Product | None:
        """A product with a copy of `weight` (out, in) in the machine's own layout; None: use the weight as it is."""
        if not (self._pack and _packs(weight)):
            return None
        # Reordered once instead of in every call: from two thirds of the memory's bandwidth to nearly all of it.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)

        def apply(x: Tensor, residual: Tensor | None) -> Tensor:
            y = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return finish(y, activation, gated, residual)

        return apply

    def quantized(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, format: Format
    ) -> TableProduct:
        """A product with a copy of `weight` in the format's levels."""
        if format is FP8:
            return Fp8Product(weight, bias, activation, gated)
        return TorchQuantizedProduct(weight, bias, activation, gated, format)

    def stack(self, shape: StackShape, layers: Sequence[StackLayer]) -> Stack | None:
        """A run of decoder layers as one call, where there is such a thing; None: layer by layer."""
        return None

    def attends_in_place(self, head_dim: int) -> bool:
        """Whether decodes read pages where they lie, or need groups of similar length and masks."""
        return False

    least_shared_rows = 4
    """Fewer rows that begin with the same blocks read them each for itself."""

    def shared_rows(self, group: int) -> int:
        """How many rows at most read blocks that all of them begin with once, together, where `group` query heads have one
        KV head; 0: every row reads its own."""
        return 0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x, weight, eps)

    def rotate(self, x: Tensor, turned: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of the first `turned` heads of x (T, H, D), in x's place; cos, sin (T, 1, D) float32."""
        x[:, :turned] = reference.rotate(x[:, :turned], cos, sin)
        return x

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
        """Normalise and rotate queries and keys, keep keys and values, return the queries (T, heads, D).

        qkv (T, heads + 2 * kv_heads, D); norms: weights (D,) of queries and keys; kv (blocks, block_size, 2, kv_heads, D).
        """
        both = heads + kv.shape[3]
        qk, value = qkv[:, :both], qkv[:, both:]
        if norms is not None:
            parts = zip((qk[:, :heads], qk[:, heads:]), norms, strict=True)
            qk = torch.cat([self.rms_norm(part, weight, eps) for part, weight in parts], dim=1)
        qk = reference.rotate(qk, cos, sin)
        store(kv, torch.stack((qk[:, heads:], value), dim=1), slots)
        return qk[:, :heads]

    def attend(self, query: Tensor, kv: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """query (T, H, D) over kv as planned; returns (T, H, D)."""
        return attend(query, kv, plan, scale)

    def attend_groups(self, qkv: Tensor, groups: int, heads: int, part: slice, out: Tensor) -> None:
        """Attention within `groups` groups of equally many rows, for some of the heads: every row sees its whole group.

        qkv (T, 3 * heads, D), queries before keys before values; out (T, heads * D), of which the part is filled in.
        """
        rows = qkv.view(groups, -1, 3, heads, qkv.shape[2])[:, :, :, part]
        made = functional.scaled_dot_product_attention(*rows.permute(2, 0, 3, 1, 4))
        out.view(groups, -1, heads, qkv.shape[2])[:, :, part] = made.transpose(1, 2)


def _packs(weight: Tensor) -> bool:
    """Whether this build and machine have a packed product for the weight's type and shape."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn or weight.shape[1] < 2:
        return False
    if weight.dtype is torch.bfloat16:
        return native_kernels_allowed() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


PLAIN = TorchKernels()
