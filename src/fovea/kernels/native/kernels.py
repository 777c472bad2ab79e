"""The C++ kernels as a set of kernels, for rows of bfloat16 on a CPU. torch computes everything else."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from fovea.kernels.attention import AttentionPlan, Heads
from fovea.kernels.base import GroupedProduct, Mixture, Product, Stack, StackLayer, StackShape, TableProduct
from fovea.kernels.codes import Codes, Format
from fovea.kernels.native.border import ANY, BF16, F32, I64, PlanChecks, address, check_numbers, pages_struct
from fovea.kernels.native.layouts import packable
from fovea.kernels.native.products import (
    CodedWeight,
    NativeExperts,
    NativeProduct,
    PackedWeight,
    QuantizedWeight,
    fuses,
)
from fovea.kernels.native.stack import NativeStack, is_native, prefix_groups_struct
from fovea.kernels.pages import INT8, KV
from fovea.kernels.pieces import Cutting
from fovea.kernels.spans import Spans
from fovea.kernels.states import StatePlan
from fovea.kernels.torch_kernels import TorchKernels, add_norm, with_values

MAX_HEAD_DIM = 512
"""Largest head whose attention is computed in place."""
MAX_SHARED_ROWS = 32
"""Largest number of rows that read common first blocks together."""
_P, _L, _I, _F = c_void_p, c_int64, c_int, c_float
SIGNATURES = {
    "fovea_exponents": [_P, _L, _P],
    "fovea_pack": [_P, _L, _P, _L, _P, _P, _P, _P, _P, _I],
    "fovea_quantize": [_P, _L, _P, _L, _L, _P, _I],
    "fovea_pack_codes": [_P, _L, _P, _L, _L, _P, _P, _I],
    "fovea_rows": [_P, _P, _L, _P],
    "fovea_product": [_P, _P, _L, _L, _I, _P, _P, _I],
    "fovea_experts": [_P, _P, _L, _P, _P, _P, _I],
    "fovea_rms_norm": [_P, _L, _L, _P, _F, _I, _P, _I],
    "fovea_gated_norm": [_P, _P, _L, _L, _L, _P, _F, _P, _I],
    "fovea_short_conv": [_P, _L, _L, _L, _L, _P, _P, _I, _P, _P, _P, _P, _L, _P, _I],
    "fovea_gated_delta": [_P, _L, _P, _P, _P, _P, _L, _L, _L, _L, _P, _P, _P, _P, _L, _P, _I],
    "fovea_rotate": [_P, _L, _L, _L, _L, _P, _P, _I],
    "fovea_rotate_store": [_P, _L, _L, _L, _L, _L, _P, _P, _P, _P, _F, _I, _P, _P, _I],
    "fovea_group_attention": [_P, _L, _L, _L, _L, _L, _L, _F, _P, _I],
    "fovea_chunk_attention": [_P, _L, _L, _L, _L, _L, _L, _P, _P, _P, _F, _P, _I],
    "fovea_decoder": [_P, _L, _P, _P, _P, _L, _P, _I],
    "fovea_decode_attention": [_P, _L, _L, _L, _L, _L, _P, _P, _L, _P, _P, _P, _F, _P, _I],
    "fovea_pin": [_P, _I],
}


class NativeKernels:
    """Implements `kernels.base.Kernels` for bfloat16 rows on a CPU.

    Everything else is delegated to torch with packed weights: other types, odd widths, head sizes that the
    kernels do not have.

    library: the compiled kernels, see `native.build.library`.
    """

    least_shared_rows = 2
    sharing_rounds = False
    kv_formats = (INT8,)
    spans_in_one_launch = False
    joins_rows = False

    def __init__(self, library: ctypes.CDLL) -> None:
        self._torch = plain = TorchKernels(pack=True)
        self.open, self.choose_experts, self.sum_experts = plain.open, plain.choose_experts, plain.sum_experts
        self._checked = PlanChecks()
        self.library = library
        for name, signature in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = signature, None

    def pin(self, cores: Sequence[int]) -> None:
        """Bind the threads of the kernels to cores, except the threads that call them. Linux only."""
        self.library.fovea_pin((c_int * len(cores))(*cores), len(cores))

    @property
    def plain(self) -> bool:
        return False

    @property
    def groups_experts(self) -> bool:
        return False

    def product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool
    ) -> Product | None:
        if weight.dtype is not BF16 or weight.shape[1] % 2:
            return self._torch.product(weight, bias, activation, gated)
        packed = PackedWeight(self.library, weight, bias, gated=gated and fuses(activation, gated))
        return NativeProduct(self.library, packed, activation, gated)

    def quantized_product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, format: Format
    ) -> TableProduct:
        if weight.dtype is not BF16:
            return self._torch.quantized_product(weight, bias, activation, gated, format)
        fused = gated and fuses(activation, gated)
        return NativeProduct(
            self.library, QuantizedWeight(self.library, weight, bias, format, gated=fused), activation, gated
        )

    def coded_product(
        self,
        parts: Sequence[Codes],
        bias: Tensor | None,
        activation: str | None,
        gated: bool,
        dtype: torch.dtype,
    ) -> TableProduct | None:
        if dtype is not BF16:
            return self._torch.coded_product(parts, bias, activation, gated, dtype)
        packed = [packable(part) for part in parts]
        known = [part for part in packed if part is not None]
        fused = gated and fuses(activation, gated)
        if len(known) < len(packed) or (fused and len({part.layout for part in known}) > 1):
            return None
        weight = CodedWeight(self.library, known, bias, gated=fused)
        return NativeProduct(self.library, weight, activation, gated)

    def grouped_product(
        self, weights: Tensor, activation: str | None, gated: bool, format: Format | None
    ) -> GroupedProduct | None:
        return None

    def stack(self, shape: StackShape, layers: Sequence[StackLayer]) -> Stack | None:
        if not self.attends_in_place(shape.head_dim) or not all(map(is_native, layers)):
            return None
        return NativeStack(self.library, shape, layers)

    def mixture(self, gate_up: Sequence[Product], down: Sequence[Product], active: int) -> Mixture | None:
        first = [p for p in gate_up if isinstance(p, NativeProduct) and p.kind]
        second = [p for p in down if isinstance(p, NativeProduct) and p.kind == 0]
        if not first or len(first) != len(gate_up) or len(second) != len(down):
            return None
        return NativeExperts(self.library, first, second, active)

    def attends_in_place(self, head_dim: int, *, window: bool = False) -> bool:
        return head_dim % 32 == 0 and head_dim <= MAX_HEAD_DIM

    def cutting(self, heads: Heads) -> Cutting | None:
        return None

    def shared_rows(self, group: int) -> int:
        return MAX_SHARED_ROWS

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, centered: bool = False) -> Tensor:
        if x.dtype is not BF16:
            return self._torch.rms_norm(x, weight, eps, centered=centered)
        x = x.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        self.library.fovea_rms_norm(
            x.data_ptr(), x.numel() // width, width, address(weight, BF16, width), eps, centered,
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rotate(self, x: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
        if x.dtype is not BF16 or not x.is_contiguous():
            return self._torch.rotate(x, count, cos, sin)
        rows, heads, dim = x.shape
        turns = [address(part.view(rows, dim), F32, rows, dim) for part in (cos, sin)]
        self.library.fovea_rotate(
            x.data_ptr(), rows, heads, count, dim, turns[0], turns[1],
            torch.get_num_threads(),
        )  # fmt: skip
        return x

    def add_norm(
        self, x: Tensor, y: Tensor, inner: Tensor | None, outer: Tensor | None, eps: float, *,
        centered: bool = False, factor: Tensor | None = None, gate: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return add_norm(self.rms_norm, x, y, inner, outer, eps, centered=centered, factor=factor, gate=gate)

    def rotate_store(
        self, qkv: Tensor, heads: int, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None,
        eps: float, kv: KV | None, slots: Tensor | None, *, centered: bool = False,
        value_norm: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if qkv.dtype is not BF16:
            return self._torch.rotate_store(
                qkv, heads, cos, sin, norms, eps, kv, slots, centered=centered, value_norm=value_norm
            )
        if kv is None or slots is None:
            query = qkv if norms is None else self.rms_norm(qkv, norms[0], eps, centered=centered)
            return self.rotate(query, heads, cos, sin)
        qkv = with_values(self.rms_norm, qkv, heads, kv.shape[3], value_norm, eps).contiguous()
        rows, _, dim = qkv.shape
        kv_heads, rotary = (qkv.shape[1] - heads) // 2, cos.shape[-1]
        if rotary > dim:
            raise ValueError(f"a rotation of {rotary} numbers does not fit into heads of {dim}")
        query_weight, key_weight = (
            (None, None) if norms is None else (address(part, BF16, dim) for part in norms)
        )
        turns = [address(part.view(rows, rotary), F32, rows, rotary) for part in (cos, sin)]
        check_numbers("KV slots", slots, 0, kv.shape[0] * kv.shape[1] - 1)
        self.library.fovea_rotate_store(
            address(qkv, BF16, rows, heads + 2 * kv_heads, dim), rows, heads, kv_heads, dim, rotary,
            turns[0], turns[1], query_weight, key_weight, eps,
            centered, ctypes.byref(pages_struct(kv, kv_heads, dim)), address(slots, I64, rows),
            torch.get_num_threads(),
        )  # fmt: skip
        return qkv[:, :heads]

    def attend(self, query: Tensor, kv: KV, plan: AttentionPlan, scale: float) -> Tensor:
        rows, heads, dim = query.shape
        if query.dtype is not BF16 or not self.attends_in_place(dim):
            return self._torch.attend(query, kv, plan, scale)
        if query.stride(1) != dim or query.stride(2) != 1:
            query = query.contiguous()
        out = query.new_empty((rows, heads, dim))
        self._checked.attention(plan, rows, kv)
        start, stride, threads = query.data_ptr(), query.stride(0), torch.get_num_threads()
        kv_heads = kv.shape[3]
        pages = ctypes.byref(pages_struct(kv, kv_heads, dim))
        for group in plan.decodes:
            count, width = group.tables.shape
            shared = prefix_groups_struct(group)
            self.library.fovea_decode_attention(
                start + 2 * group.row * stride, stride, count, heads, kv_heads, dim, pages,
                group.tables.data_ptr(), width, group.lengths.data_ptr(), address(group.firsts, I64, count),
                ctypes.byref(shared) if shared else None, scale, out[group.row :].data_ptr(), threads,
            )  # fmt: skip
        for chunk in plan.chunks:
            self.library.fovea_chunk_attention(
                start + 2 * chunk.row * stride, stride, chunk.count, chunk.first, heads, kv_heads, dim, pages,
                chunk.table.data_ptr(), address(chunk.limits, I64, chunk.count, 2), scale,
                out[chunk.row :].data_ptr(), threads,
            )  # fmt: skip
        return out

    def attend_spans(self, qkv: Tensor, spans: Spans, heads: int) -> Tensor:
        return self._torch.attend_spans(qkv, spans, heads)

    def attend_groups(self, qkv: Tensor, groups: int, heads: int, part: slice, out: Tensor) -> None:
        rows, _, dim = qkv.shape
        if qkv.dtype is not BF16 or dim % 2 or not (qkv.is_contiguous() and out.is_contiguous()):
            return self._torch.attend_groups(qkv, groups, heads, part, out)
        if rows % groups:
            raise ValueError(f"the rows must be a multiple of the {groups} groups, got {rows} rows")
        if not 0 <= part.start <= part.stop <= heads:
            raise ValueError(f"heads of a part must be from 0 to {heads}, got {part.start} to {part.stop}")
        self.library.fovea_group_attention(
            address(qkv, BF16, rows, 3 * heads, dim), groups, rows // groups, heads, part.start, part.stop,
            dim, dim**-0.5, address(out, BF16, rows, heads * dim), torch.get_num_threads(),
        )  # fmt: skip
        return None

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype is not BF16 or gate.dtype is not BF16 or gate.shape != x.shape:
            return self._torch.gated_norm(x, gate, weight, eps)
        width = x.shape[-1]
        x, rows = x.contiguous(), gate.reshape(-1, width)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = torch.empty_like(x)
        self.library.fovea_gated_norm(
            x.data_ptr(), rows.data_ptr(), rows.stride(0), len(rows), width, address(weight, BF16, width),
            eps, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor,
        plan: StatePlan,
    ) -> Tensor:  # fmt: skip
        if x.dtype is not BF16 or activation not in (None, "silu") or x.stride(1) != 1:
            return self._torch.short_conv(x, weight, bias, activation, state, plan)
        rows, channels = x.shape
        out = x.new_empty((rows, channels))
        table, width = plan.table, weight.shape[0]
        self._checked.states(table, rows, len(state))
        self.library.fovea_short_conv(
            x.data_ptr(), x.stride(0), rows, channels, width, address(weight, BF16, width, channels),
            address(bias, BF16, channels), activation is not None,
            address(state, BF16, ANY, width - 1, channels), table.starts.data_ptr(), table.runs.data_ptr(),
            table.saves.data_ptr(), len(table.starts) - 1, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gated_delta(
        self, qkv: Tensor, beta: Tensor, step: Tensor, rates: tuple[Tensor, Tensor], key_heads: int,
        state: Tensor, plan: StatePlan,
    ) -> Tensor:  # fmt: skip
        if qkv.dtype is not BF16:
            return self._torch.gated_delta(qkv, beta, step, rates, key_heads, state, plan)
        qkv, beta, step = qkv.contiguous(), beta.sigmoid().float().contiguous(), step.float().contiguous()
        heads, key_dim, value_dim = state.shape[1:]
        table, rows = plan.table, len(qkv)
        self._checked.states(table, rows, len(state))
        out = qkv.new_empty((rows, heads * value_dim))
        self.library.fovea_gated_delta(
            address(qkv, BF16, rows, 2 * key_heads * key_dim + heads * value_dim), rows,
            address(beta, F32, rows, heads), address(step, F32, rows, heads), address(rates[0], F32, heads),
            address(rates[1], F32, heads), key_heads, heads, key_dim, value_dim,
            address(state, F32, ANY, heads, key_dim, value_dim), table.starts.data_ptr(),
            table.runs.data_ptr(), table.saves.data_ptr(), len(table.starts) - 1, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out
