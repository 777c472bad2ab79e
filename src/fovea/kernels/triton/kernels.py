"""The Triton kernels as a set of kernels, for a GPU. torch computes everything else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels.activation import finish
from fovea.kernels.attention import AttentionPlan, ChunkAttention, Heads, prefill_each
from fovea.kernels.base import Product, Stack, StackLayer, StackShape
from fovea.kernels.pieces import Cutting
from fovea.kernels.spans import attend_each
from fovea.kernels.spans import load as load_spans
from fovea.kernels.torch_kernels import TorchKernels
from fovea.kernels.triton import decode as triton_decode
from fovea.kernels.triton import rotate as triton_rotate
from fovea.kernels.triton import rows as triton_rows

CPU_PROCESSORS = 8
"""Number of processors that is assumed in the interpreter. It is large enough that contexts are split."""


class TritonProduct:
    """torch's product with the plain weight. A gated activation after it is one launch."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool) -> None:
        self._weight, self._bias = weight, bias
        self._activation, self._gated = activation, gated

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.finish(functional.linear(x, self._weight, self._bias), residual)

    def finish(self, y: Tensor, residual: Tensor | None) -> Tensor:
        if self._gated and self._activation is not None:
            y = triton_rows.gate(y, self._activation)
            return y if residual is None else residual + y
        return finish(y, self._activation, self._gated, residual)


class TritonKernels:
    """Implements `kernels.base.Kernels` for a GPU. It delegates the rest to plain torch."""

    least_shared_rows = 4
    add_norm = staticmethod(triton_rows.add_norm)
    rotate_store = staticmethod(triton_rows.rotate_store)

    def __init__(self, device: torch.device, chunks: ChunkAttention = prefill_each) -> None:
        """chunks: computes the attention of prompts, for which there is no Triton kernel here."""
        plain = TorchKernels()
        self.quantized_product, self.mixture = plain.quantized_product, plain.mixture
        self.gated_norm, self.attend_groups = plain.gated_norm, plain.attend_groups
        self.attend_spans = load_spans(device)
        self.short_conv, self.gated_delta = plain.short_conv, plain.gated_delta
        self._chunks = chunks
        self._processors = CPU_PROCESSORS
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    @property
    def plain(self) -> bool:
        return False

    @property
    def spans_in_one_launch(self) -> bool:
        return self.attend_spans is not attend_each

    @property
    def groups_experts(self) -> bool:
        return True

    def product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool
    ) -> Product | None:
        return TritonProduct(weight, bias, activation, gated)

    def stack(self, shape: StackShape, layers: Sequence[StackLayer]) -> Stack | None:
        return TritonStack(self, shape, layers)

    def attends_in_place(self, head_dim: int, *, window: bool = False) -> bool:
        return True

    def cutting(self, heads: Heads) -> Cutting | None:
        return triton_decode.cutting(heads, self._processors)

    def shared_rows(self, group: int) -> int:
        return triton_decode.shared_rows(group)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, centered: bool = False) -> Tensor:
        return triton_rows.rms_norm(x, weight, eps, centered=centered)

    def rotate(self, x: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
        return triton_rotate.rotate(x, count, cos, sin)

    def attend(self, query: Tensor, kv: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        query = query.contiguous()
        out = torch.empty_like(query)
        for group in plan.decodes:
            rows = slice(group.row, group.row + len(group.tables))
            triton_decode.decode(query[rows], kv, group, scale, self._processors, out[rows])
        if plan.chunks:
            # FlashInfer has no limits that differ from row to row.
            limited = any(chunk.limits is not None for chunk in plan.chunks)
            (prefill_each if limited else self._chunks)(query, kv, plan.chunks, scale, out)
        return out


class TritonStack:
    """A run of decoder layers. A norm's kernel adds the residual before it. It is a `kernels.base.Stack`."""

    def __init__(self, kernels: TritonKernels, shape: StackShape, layers: Sequence[StackLayer]) -> None:
        self._kernels, self._shape, self._layers = kernels, shape, layers

    def __call__(
        self, x: Tensor, first: int, last: int, cos: Tensor, sin: Tensor, kv: Tensor, plan: AttentionPlan,
        read: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if first == last:
            return x if read is None else x[read]
        shape, kernels, rows = self._shape, self._kernels, len(x)
        heads = shape.heads + 2 * shape.kv_heads
        x = x.contiguous()
        delta: Tensor | None = None
        for index in range(first, last):
            layer = self._layers[index]
            qkv_product, out_product, gate_up, down = _products(layer)
            norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
            if delta is None:
                normal = kernels.rms_norm(x, layer.input_norm, shape.eps)
            else:
                x, normal = kernels.add_norm(x, delta, None, layer.input_norm, shape.eps)
            qkv = qkv_product(normal, None).view(rows, heads, shape.head_dim)
            query = kernels.rotate_store(qkv, shape.heads, cos, sin, norms, shape.eps, kv[index], plan.slots)
            out = kernels.attend(query, kv[index], plan, shape.scale)
            out = out.view(rows, -1)
            if read is not None and index == last - 1:
                if not len(read):
                    return x[:0]
                x, out = x[read], out[read]
            x, normal = kernels.add_norm(x, out_product(out, None), None, layer.post_norm, shape.eps)
            delta = down(gate_up(normal, None), None)
        return x if delta is None else x + delta


def _products(layer: StackLayer) -> tuple[Product, Product, Product, Product]:
    assert layer.qkv is not None
    assert layer.out is not None
    assert layer.gate_up is not None
    assert layer.down is not None
    return layer.qkv, layer.out, layer.gate_up, layer.down
