"""The Triton kernels as a set of kernels, for a GPU. torch computes everything else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from fovea.core.precision import KV_COMPUTE
from fovea.kernels.activation import ACTIVATIONS
from fovea.kernels.attention import AttentionPlan, ChunkAttention, Heads, prefill_each
from fovea.kernels.base import GroupedProduct, Product, Stack, StackLayer, StackShape, TableProduct
from fovea.kernels.codes import Codes, Format
from fovea.kernels.pages import FP8, INT8, KV, KVFormat, QuantizedKV
from fovea.kernels.pieces import Cutting
from fovea.kernels.spans import attend_each
from fovea.kernels.spans import load as load_spans
from fovea.kernels.states import Decodes, StatePlan
from fovea.kernels.torch_kernels import TorchKernels, conv_run
from fovea.kernels.torch_kernels import gated_delta as plain_gated_delta
from fovea.kernels.triton import decode as triton_decode
from fovea.kernels.triton import experts as triton_experts
from fovea.kernels.triton import quantized
from fovea.kernels.triton import rotate as triton_rotate
from fovea.kernels.triton import rows as triton_rows
from fovea.kernels.triton import states as triton_states
from fovea.kernels.triton.products import ROW_GROUP, Weight

log = logging.getLogger("fovea.kernels")
MAX_TRIAL_ERROR = 0.2
"""Largest accepted relative error of products in the trial.

Rounding to 8-bit floats makes 0.04, and to bfloat16 a tenth of that. A wrong result is off by about 1.
"""
CPU_PROCESSORS = 8
"""Number of processors that is assumed in the interpreter. It is large enough that contexts are split."""


class TritonProduct:
    """torch's product with the plain weight, in `aligned_rows`. A gated activation after it is one launch."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool) -> None:
        if weight.shape[1] % triton_rows.ALIGNED:
            weight = triton_rows.aligned_rows(weight, *weight.shape).copy_(weight)
        self._weight, self._bias = weight, bias
        self._activation, self._gated = activation, gated

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        y = functional.linear(x, self._weight, self._bias)
        return triton_rows.finish(y, self._activation, self._gated, residual, aligned=True)


class TritonKernels:
    """Implements `kernels.base.Kernels` for a GPU. It delegates the rest to plain torch."""

    least_shared_rows = 4
    sharing_rounds = True
    joins_rows = True
    add_norm = staticmethod(triton_rows.add_norm)
    rotate_store = staticmethod(triton_rows.rotate_store)
    gated_norm = staticmethod(triton_states.gated_norm)
    open = staticmethod(triton_rows.open_gate)
    choose_experts = staticmethod(triton_experts.choose_experts)
    sum_experts = staticmethod(triton_experts.sum_experts)

    def __init__(self, device: torch.device, chunks: ChunkAttention = prefill_each) -> None:
        """chunks: computes the attention of prompts, for which there is no Triton kernel here."""
        self._torch = plain = TorchKernels()
        self.mixture = plain.mixture
        self.attend_groups = plain.attend_groups
        self.attend_spans = load_spans(device)
        self._chunks = chunks
        self._trials: dict[Hashable, bool] = {}
        self.kv_formats: tuple[KVFormat, ...] = (INT8, FP8)
        self._processors = CPU_PROCESSORS
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
            capability = torch.cuda.get_device_capability(device)
            self.kv_formats = tuple(
                format for format in self.kv_formats if capability >= KV_COMPUTE[format.name]
            )

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

    def quantized_product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, format: Format
    ) -> TableProduct:
        if not self._multiplies(format, weight):
            return self._torch.quantized_product(weight, bias, activation, gated, format)
        return quantized.quantized_product(weight, bias, activation, gated, format, self._processors)

    def coded_product(
        self,
        parts: Sequence[Codes],
        bias: Tensor | None,
        activation: str | None,
        gated: bool,
        dtype: torch.dtype,
    ) -> TableProduct | None:
        product = quantized.coded_product(parts, bias, activation, gated, self._processors)
        if product is not None and not all(self._multiplies_codes(each, dtype) for each in product.weights):
            return self._torch.coded_product(parts, bias, activation, gated, dtype)
        return product

    def grouped_product(
        self, weights: Tensor, activation: str | None, gated: bool, format: Format | None
    ) -> GroupedProduct | None:
        if not self._multiplies(format, weights):
            return None
        return quantized.TritonGroupedProduct(weights, activation, gated, format, self._processors)

    def _multiplies(self, format: Format | None, weight: Tensor) -> bool:
        """Whether Triton's products of a format work here. The first call for a type tries an example.

        weight: (n, k), or those of experts, (experts, n, k).
        """
        dtype, grouped = weight.dtype, weight.dim() == 3
        name = f"{'experts' if grouped else 'products'} with {format.name if format else 'plain'} weights"
        trial = partial(quantized.trial_error, format, dtype, weight.device, grouped, self._processors)
        return self._works((format, dtype, grouped), f"{name} and rows of {dtype}", trial)

    def _multiplies_codes(self, weight: Weight, dtype: torch.dtype) -> bool:
        """Whether Triton's products with codes of a scheme work here. The first call tries them."""
        groups = "one group per output" if weight.group == ROW_GROUP else f"groups of {weight.group}"
        name = f"products with codes of {weight.bits} bits in {groups} and rows of {dtype}"
        trial = partial(quantized.coded_trial_error, weight, dtype, self._processors)
        return self._works((weight.scheme, dtype), name, trial)

    def _works(self, key: Hashable, name: str, trial: Callable[[], float]) -> bool:
        if key not in self._trials:
            problem = _problem(trial)
            self._trials[key] = not problem
            if problem:
                log.warning("%s: torch's, which are slower; Triton's %s", name, problem)
            else:
                log.info("%s: Triton's, which read the weights as they are stored", name)
        return self._trials[key]

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

    def attend(self, query: Tensor, kv: KV, plan: AttentionPlan, scale: float) -> Tensor:
        query = query.contiguous()
        out = torch.empty_like(query)
        for group in plan.decodes:
            rows = slice(group.row, group.row + len(group.tables))
            triton_decode.decode(query[rows], kv, group, scale, self._processors, out[rows])
        if plan.chunks:
            # FlashInfer has no limits that differ from row to row.
            limited = any(chunk.limits is not None for chunk in plan.chunks)
            attend_chunks = prefill_each if limited else self._chunks
            if isinstance(kv, QuantizedKV):
                attend_chunks = triton_decode.prefill
            attend_chunks(query, kv, plan.chunks, scale, out)
        return out

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor,
        plan: StatePlan,
    ) -> Tensor:  # fmt: skip
        out = x.new_empty(x.shape)
        for wave in plan.waves:
            if wave.decodes is not None:
                triton_states.conv(x, weight, bias, activation, state, wave.decodes, out)
            for run in wave.runs:
                conv_run(x, weight, bias, state, run, out)
                if activation is not None:
                    rows = out[run.row : run.row + run.count]
                    rows.copy_(ACTIVATIONS[activation](rows))
        return out

    def gated_delta(
        self, qkv: Tensor, beta: Tensor, step: Tensor, rates: tuple[Tensor, Tensor], key_heads: int,
        state: Tensor, plan: StatePlan,
    ) -> Tensor:  # fmt: skip
        if qkv.stride(1) != 1:
            qkv = qkv.contiguous()

        def decode(decodes: Decodes, out: Tensor) -> None:
            triton_states.delta(qkv, beta, step, rates, key_heads, state, decodes, out)

        if any(wave.runs for wave in plan.waves):
            return plain_gated_delta(qkv, beta, step, rates, key_heads, state, plan, decode)
        out = qkv.new_empty((len(qkv), state.shape[1] * state.shape[3]))
        for wave in plan.waves:
            if wave.decodes is not None:
                decode(wave.decodes, out)
        return out


class TritonStack:
    """A run of decoder layers. A norm's kernel adds the residual before it. It is a `kernels.base.Stack`."""

    def __init__(self, kernels: TritonKernels, shape: StackShape, layers: Sequence[StackLayer]) -> None:
        self._kernels, self._shape, self._layers = kernels, shape, layers

    def __call__(
        self, x: Tensor, first: int, last: int, cos: Tensor, sin: Tensor, kv: KV, plan: AttentionPlan,
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


def _problem(trial: Callable[[], float]) -> str:
    """Return why products cannot be used whose errors a trial returns; an empty string if they can."""
    try:
        error = trial()
    except Exception as problem:  # noqa: BLE001 - the compiler and the driver may raise any exception
        first_line = (str(problem).splitlines() or [""])[0]
        return f"failed: {type(problem).__name__}: {first_line}"
    return "" if error < MAX_TRIAL_ERROR else f"differ from them by {error:.2g}"


def _products(layer: StackLayer) -> tuple[Product, Product, Product, Product]:
    assert layer.qkv is not None
    assert layer.out is not None
    assert layer.gate_up is not None
    assert layer.down is not None
    return layer.qkv, layer.out, layer.gate_up, layer.down
