"""The C++ kernels as a set of kernels: bf16 rows on a CPU; what they do not cover goes to torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from fovea.kernels.activation import finish
from fovea.kernels.attention import AttentionPlan
from fovea.kernels.torch_kernels import Product, Stack, StackLayer, StackShape, TorchKernels

PANEL, LANES, CODES = 64, 16, 15
PACKED_TILE, PLAIN_TILE = 48, 64  # bytes
MAX_EXCEPTIONS = 0.002
ACTIVATIONS = {
    (None, False): 0, ("silu", True): 1, ("gelu_pytorch_tanh", True): 2, ("gelu_new", True): 2, ("gelu", True): 3,
    ("gelu_pytorch_tanh", False): 4, ("gelu_new", False): 4, ("gelu", False): 5, ("quick_gelu", False): 6,
    ("silu", False): 7,
}  # fmt: skip


class _Weight(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p), ("table", c_void_p), ("starts", c_void_p), ("exceptions", c_void_p),
        ("bias", c_void_p), ("n", c_int64), ("k", c_int64),
    ]  # fmt: skip


_P, _L, _I, _F = c_void_p, c_int64, c_int, c_float
SIGNATURES = {
    "fovea_exponents": [_P, _L, _P],
    "fovea_pack": [_P, _L, _P, _L, _P, _P, _P, _P, _P, _I],
    "fovea_rows": [_P, _P, _L, _P],
    "fovea_product": [_P, _P, _L, _L, _I, _P, _P, _I],
    "fovea_rms_norm": [_P, _L, _L, _P, _F, _P, _I],
    "fovea_rotate": [_P, _L, _L, _L, _L, _P, _P, _I],
    "fovea_rotate_store": [_P, _L, _L, _L, _L, _P, _P, _P, _P, _F, _P, _P, _I],
    "fovea_group_attention": [_P, _L, _L, _L, _L, _L, _L, _F, _P, _I],
    "fovea_chunk_attention": [_P, _L, _L, _L, _L, _L, _L, _P, _L, _P, _F, _P, _I],
    "fovea_decoder": [_P, _L, _P, _P, _P, _L, _P, _I],
    "fovea_decode_attention": [_P, _L, _L, _L, _L, _L, _P, _L, _P, _L, _P, _F, _P, _I],
}


class PackedWeight:
    """A bf16 weight (n, k) in the layout of `cpu/product.cpp`, three quarters of its bytes, nothing lost.

    gated: the first half of the outputs are gates, the second half what they scale; a panel holds both.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
        if weight.dtype is not torch.bfloat16 or weight.shape[1] % 2:
            raise ValueError(
                f"a packed weight is bf16 with an even width, got {weight.dtype} {list(weight.shape)}"
            )
        self.library = library
        self.n, self.k = weight.shape
        weight = weight.contiguous()
        order = _order(self.n, gated=gated)
        self.panels = len(order) // PANEL
        codes, self.table = self._codes(weight)
        self.data, self.starts, self.exceptions = self._tiles(weight, order, codes)
        if len(self.exceptions) > MAX_EXCEPTIONS * weight.numel():
            self.table = None
            self.data, self.starts, self.exceptions = self._tiles(weight, order, None)
        self.bias = None
        if bias is not None:
            self.bias = torch.where(order >= 0, bias.float()[order.clamp(min=0)], 0.0).contiguous()
        self.struct = _Weight(
            self.data.data_ptr(),
            None if self.table is None else self.table.data_ptr(),
            self.starts.data_ptr(),
            self.exceptions.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.n,
            self.k,
        )
        self.address = ctypes.addressof(self.struct)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.exceptions.nbytes

    def _codes(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes 1..15 for the most frequent exponents; 0 says zero, or see the exceptions."""
        counts = torch.zeros(256, dtype=torch.int64)
        self.library.fovea_exponents(weight.data_ptr(), weight.numel(), counts.data_ptr())
        counts[0] = -1
        frequent = counts.argsort(descending=True)[:CODES]
        codes = torch.zeros(256, dtype=torch.uint8)
        codes[frequent] = torch.arange(1, CODES + 1, dtype=torch.uint8)
        table = torch.zeros(CODES + 1, dtype=torch.uint8)
        table[1:] = frequent.to(torch.uint8)
        return codes, table

    def _tiles(self, weight: Tensor, order: Tensor, codes: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        tile = PLAIN_TILE if codes is None else PACKED_TILE
        data = torch.empty(self.panels * self.k // 2 * PANEL // LANES * tile, dtype=torch.uint8)
        found = torch.zeros(self.panels, dtype=torch.int64)
        starts = torch.zeros(self.panels + 1, dtype=torch.int64)
        exceptions = torch.zeros(0, dtype=torch.int64)
        for again in (False, True):
            self.library.fovea_pack(
                weight.data_ptr(), self.k, order.data_ptr(), self.panels,
                None if codes is None else codes.data_ptr(), data.data_ptr(), found.data_ptr(), starts.data_ptr(),
                exceptions.data_ptr() if again else None, torch.get_num_threads(),
            )  # fmt: skip
            if again or not int(found.sum()):
                break
            torch.cumsum(found, 0, out=starts[1:])
            exceptions = torch.zeros(int(starts[-1]), dtype=torch.int64)
        return data, starts, exceptions

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight as they were, (len(ids), k); not of a gated one."""
        out = torch.empty(len(ids), self.k, dtype=torch.bfloat16)
        self.library.fovea_rows(self.address, ids.contiguous().data_ptr(), len(ids), out.data_ptr())
        return out


def _order(n: int, *, gated: bool) -> Tensor:
    """Which row of the weight each output of the panels shows, -1 for padding."""
    if not gated:
        panels = -(-n // PANEL)
        order = torch.full((panels * PANEL,), -1, dtype=torch.int64)
        order[:n] = torch.arange(n)
        return order
    half, width = n // 2, PANEL // 2
    panels = -(-half // width)
    gates = torch.full((panels * width,), -1, dtype=torch.int64)
    gates[:half] = torch.arange(half)
    gates = gates.view(panels, 1, width)
    ups = torch.where(gates >= 0, gates + half, -1)
    return torch.cat((gates, ups), dim=1).reshape(-1)


class NativeProduct:
    """kind: the activation's number, fused into the product; None where torch has to apply it."""

    def __init__(
        self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool
    ) -> None:
        self.kind = ACTIVATIONS.get((activation, gated))
        self.activation, self.gated = activation, gated
        fused = gated and self.kind is not None
        self.weight = PackedWeight(library, weight, bias, gated=fused)
        self.width = self.weight.n // 2 if fused else self.weight.n
        self._multiply = library.fovea_product

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        x = x.contiguous()
        rows = x.numel() // self.weight.k
        y = x.new_empty((*x.shape[:-1], self.width))
        fused = None if residual is None or self.kind is None else residual.contiguous()
        self._multiply(
            self.weight.address, x.data_ptr(), self.weight.k, rows, self.kind or 0,
            None if fused is None else fused.data_ptr(), y.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return y if self.kind is not None else finish(y, self.activation, self.gated, residual)


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, c_void_p)
        for name in ("input_norm", "post_norm", "q_norm", "k_norm", "qkv", "out", "gate_up", "down")
    ] + [("activation", c_int64)]


class _Shape(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "intermediate")] + [
        ("eps", c_float),
        ("scale", c_float),
    ]


class _Chunk(ctypes.Structure):
    _fields_ = [("row", c_int64), ("count", c_int64), ("first", c_int64), ("table", c_void_p)]


class _Attention(ctypes.Structure):
    _fields_ = [
        ("cos", c_void_p), ("sin", c_void_p), ("slots", c_void_p), ("block", c_int64), ("layer_stride", c_int64),
        ("decodes", c_int64), ("table_width", c_int64), ("tables", c_void_p), ("lengths", c_void_p),
        ("chunks", c_int64), ("chunk", ctypes.POINTER(_Chunk)),
    ]  # fmt: skip


def _native(layer: StackLayer) -> list[NativeProduct]:
    """Those of the layer's products that C++ can do to the end."""
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return [p for p in products if isinstance(p, NativeProduct) and p.kind is not None]


class NativeStack:
    """Decoder layers as one call. `shape`: what they share; `parts`: what each is made of."""

    def __init__(self, library: ctypes.CDLL, shape: StackShape, parts: Sequence[StackLayer]) -> None:
        self._run = library.fovea_decoder
        self._parts = parts
        self._shape = _Shape(
            shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.eps, shape.scale
        )  # fmt: skip
        self._layers = (_Layer * len(parts))()
        for layer, part in zip(self._layers, parts, strict=True):
            norms = (part.input_norm, part.post_norm, part.q_norm, part.k_norm)
            values: list[int | None] = [None if norm is None else norm.data_ptr() for norm in norms]
            products = _native(part)
            values += [product.weight.address for product in products]
            for field, value in zip(_Layer._fields_, values, strict=False):
                setattr(layer, field[0], value)
            layer.activation = products[2].kind

    def __call__(
        self, x: Tensor, first: int, last: int, cos: Tensor, sin: Tensor, kv: Tensor, plan: AttentionPlan
    ) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        attention = _Attention(
            cos.data_ptr(), sin.data_ptr(), plan.slots.data_ptr(), kv.shape[2], kv.stride(0), 0, 0, None, None,
            len(plan.chunks),
        )  # fmt: skip
        if plan.decodes:
            (group,) = plan.decodes
            attention.decodes, attention.table_width = group.tables.shape
            attention.tables, attention.lengths = group.tables.data_ptr(), group.lengths.data_ptr()
        if plan.chunks:
            chunks = [_Chunk(c.row, c.count, c.first, c.table.data_ptr()) for c in plan.chunks]
            attention.chunk = (_Chunk * len(chunks))(*chunks)
        self._run(
            ctypes.byref(self._layers, first * ctypes.sizeof(_Layer)), last - first, ctypes.byref(self._shape),
            ctypes.byref(attention), x.data_ptr(), len(x), kv[first].data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return x


class NativeKernels(TorchKernels):
    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(pack=True)
        self.library = library
        for name, signature in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = signature, None

    def product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool
    ) -> Product | None:
        if weight.dtype is not torch.bfloat16 or weight.shape[1] % 2:
            return super().product(weight, bias, activation, gated)
        return NativeProduct(self.library, weight, bias, activation, gated)

    def stack(self, shape: StackShape, layers: Sequence[StackLayer]) -> Stack | None:
        if (
            shape.head_dim % 32
            or shape.head_dim > 128
            or not all(len(_native(layer)) == 4 for layer in layers)
        ):
            return None
        return NativeStack(self.library, shape, layers)

    def attends_in_place(self, head_dim: int) -> bool:
        return head_dim % 32 == 0 and head_dim <= 128

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype is not torch.bfloat16:
            return super().rms_norm(x, weight, eps)
        x = x.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        self.library.fovea_rms_norm(
            x.data_ptr(), x.numel() // width, width, weight.data_ptr(), eps, out.data_ptr(), torch.get_num_threads()
        )  # fmt: skip
        return out

    def rotate(self, x: Tensor, turned: int, cos: Tensor, sin: Tensor) -> Tensor:
        if x.dtype is not torch.bfloat16 or not x.is_contiguous():
            return super().rotate(x, turned, cos, sin)
        rows, heads, dim = x.shape
        self.library.fovea_rotate(
            x.data_ptr(), rows, heads, turned, dim, cos.data_ptr(), sin.data_ptr(), torch.get_num_threads()
        )
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
        if qkv.dtype is not torch.bfloat16:
            return super().rotate_store(qkv, heads, cos, sin, norms, eps, kv, slots)
        qkv = qkv.contiguous()
        rows, _, dim = qkv.shape
        query_weight, key_weight = (
            (None, None) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
        )
        self.library.fovea_rotate_store(
            qkv.data_ptr(), rows, heads, kv.shape[3], dim, cos.data_ptr(), sin.data_ptr(), query_weight, key_weight,
            eps, kv.data_ptr(), slots.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return qkv[:, :heads]

    def attend(self, query: Tensor, kv: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        rows, heads, dim = query.shape
        if query.dtype is not torch.bfloat16 or not self.attends_in_place(dim):
            return super().attend(query, kv, plan, scale)
        if query.stride(1) != dim or query.stride(2) != 1:
            query = query.contiguous()
        out = query.new_empty((rows, heads, dim))
        at, stride, threads = query.data_ptr(), query.stride(0), torch.get_num_threads()
        pages = kv.data_ptr(), kv.shape[1]
        for group in plan.decodes:
            count, width = group.tables.shape
            self.library.fovea_decode_attention(
                at + 2 * group.row * stride, stride, count, heads, kv.shape[3], dim, *pages, group.tables.data_ptr(),
                width, group.lengths.data_ptr(), scale, out[group.row :].data_ptr(), threads,
            )  # fmt: skip
        for chunk in plan.chunks:
            self.library.fovea_chunk_attention(
                at + 2 * chunk.row * stride, stride, chunk.count, chunk.first, heads, kv.shape[3], dim, *pages,
                chunk.table.data_ptr(), scale, out[chunk.row :].data_ptr(), threads,
            )  # fmt: skip
        return out

    def attend_groups(self, qkv: Tensor, groups: int, heads: int, part: slice, out: Tensor) -> None:
        rows, _, dim = qkv.shape
        if qkv.dtype is not torch.bfloat16 or dim % 2 or not (qkv.is_contiguous() and out.is_contiguous()):
            return super().attend_groups(qkv, groups, heads, part, out)
        self.library.fovea_group_attention(
            qkv.data_ptr(), groups, rows // groups, heads, part.start, part.stop, dim, dim**-0.5, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return None
