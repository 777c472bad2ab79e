"""The kernels in torch, which run everywhere. On a CPU their weights can be in oneDNN's layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels import reference
from fovea.kernels.activation import finish
from fovea.kernels.attention import AttentionPlan, attend, store
from fovea.kernels.base import Mixture, Product, Stack, StackLayer, StackShape, TableProduct
from fovea.kernels.fp8 import FP8, Fp8Product
from fovea.kernels.native.instruction_sets import has_bf16_units
from fovea.kernels.quantize import Format, TorchQuantizedProduct
from fovea.kernels.states import StatePlan
from fovea.kernels.torch import recurrent


class TorchKernels:
    """Implements all of `kernels.base.Kernels`, on every device and in every float type."""

    least_shared_rows = 4

    def __init__(self, *, pack: bool = False) -> None:
        """pack: keep weights in the layout that oneDNN multiplies fastest (on a CPU only)."""
        self._pack = pack

    @property
    def plain(self) -> bool:
        return not self._pack

    @property
    def groups_experts(self) -> bool:
        return not self._pack

    def product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool
    ) -> Product | None:
        if not (self._pack and _can_pack(weight)):
            return None
        # Reordered once instead of in every call. This raises the rate of a product from two thirds of the
        # memory's bandwidth to nearly all of it.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)

        def apply(x: Tensor, residual: Tensor | None) -> Tensor:
            y = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return finish(y, activation, gated, residual)

        return apply

    def quantized_product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, format: Format
    ) -> TableProduct:
        if format is FP8:
            return Fp8Product(weight, bias, activation, gated)
        return TorchQuantizedProduct(weight, bias, activation, gated, format)

    def stack(self, shape: StackShape, layers: Sequence[StackLayer]) -> Stack | None:
        return None

    def mixture(self, gate_up: Sequence[Product], down: Sequence[Product], active: int) -> Mixture | None:
        return None

    def attends_in_place(self, head_dim: int, *, window: bool = False) -> bool:
        return False

    def shared_rows(self, group: int) -> int:
        return 0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, centered: bool = False) -> Tensor:
        if centered:
            return reference.centered_rms_norm(x, weight, eps)
        return reference.rms_norm(x, weight, eps)

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.gated_norm(x, gate, weight, eps)

    def rotate(self, x: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
        x[:, :count] = reference.rotate(x[:, :count], cos, sin)
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
        *,
        centered: bool = False,
    ) -> Tensor:
        rotated_heads = heads + kv.shape[3]
        qk, value = qkv[:, :rotated_heads], qkv[:, rotated_heads:]
        if norms is not None:
            parts = zip((qk[:, :heads], qk[:, heads:]), norms, strict=True)
            qk = torch.cat(
                [self.rms_norm(part, weight, eps, centered=centered) for part, weight in parts], dim=1
            )
        qk = reference.rotate(qk, cos, sin)
        store(kv, torch.stack((qk[:, heads:], value), dim=1), slots)
        return qk[:, :heads]

    def attend(self, query: Tensor, kv: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        return attend(query, kv, plan, scale)

    def attend_groups(self, qkv: Tensor, groups: int, heads: int, part: slice, out: Tensor) -> None:
        rows = qkv.view(groups, -1, 3, heads, qkv.shape[2])[:, :, :, part]
        output = functional.scaled_dot_product_attention(*rows.permute(2, 0, 3, 1, 4))
        out.view(groups, -1, heads, qkv.shape[2])[:, :, part] = output.transpose(1, 2)

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        state: Tensor,
        plan: StatePlan,
    ) -> Tensor:
        return recurrent.short_conv(x, weight, bias, activation, state, plan)

    def gated_delta(
        self,
        qkv: Tensor,
        beta: Tensor,
        step: Tensor,
        rates: tuple[Tensor, Tensor],
        key_heads: int,
        state: Tensor,
        plan: StatePlan,
    ) -> Tensor:
        return recurrent.gated_delta(qkv, beta, step, rates, key_heads, state, plan)


def _can_pack(weight: Tensor) -> bool:
    """Whether torch has a packed product for the weight's type and shape on this machine."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn or weight.shape[1] < 2:
        return False
    if weight.dtype is torch.bfloat16:
        return has_bf16_units() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


PLAIN = TorchKernels()
