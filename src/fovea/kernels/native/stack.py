"""A run of decoder layers as one call of the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from fovea.kernels.attention import AttentionPlan, Decodes
from fovea.kernels.base import StackLayer, StackShape
from fovea.kernels.native.border import ANY, BF16, F32, I64, address, check_numbers, check_plan, pages_struct
from fovea.kernels.native.products import NativeExperts, NativeProduct
from fovea.kernels.pages import KV


class _Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", c_void_p), ("post_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("qkv", c_void_p), ("out", c_void_p), ("gate_up", c_void_p), ("down", c_void_p),
        ("activation", c_int64), ("router", c_void_p), ("mixture", c_void_p),
    ]  # fmt: skip


class _Shape(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "intermediate")] + [
        ("eps", c_float),
        ("scale", c_float),
    ]


class _Chunk(ctypes.Structure):
    _fields_ = [("row", c_int64), ("count", c_int64), ("first", c_int64), ("table", c_void_p)]


class _PrefixGroups(ctypes.Structure):
    _fields_ = [("count", c_int64), ("width", c_int64), ("members", c_void_p), ("lengths", c_void_p)]


def prefix_groups_struct(group: Decodes) -> _PrefixGroups | None:
    """Return `group.shared` for the C++ kernels. The tensors must live as long as the structure is used."""
    if group.shared is None:
        return None
    members, lengths = group.shared.members, group.shared.lengths
    return _PrefixGroups(*members.shape, members.data_ptr(), lengths.data_ptr())


class _Attention(ctypes.Structure):
    _fields_ = [
        ("cos", c_void_p), ("sin", c_void_p), ("slots", c_void_p),
        ("layer_stride", c_int64), ("decodes", c_int64), ("table_width", c_int64), ("tables", c_void_p),
        ("lengths", c_void_p),
        ("shared", ctypes.POINTER(_PrefixGroups)), ("chunks", c_int64), ("chunk", ctypes.POINTER(_Chunk)),
        ("read", c_void_p), ("reads", c_int64),
    ]  # fmt: skip


def native_products(layer: StackLayer) -> list[NativeProduct]:
    """Return those of the products qkv, out, gate_up and down whose activation C++ computes, too."""
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return [p for p in products if isinstance(p, NativeProduct) and p.kind is not None]


def is_native(layer: StackLayer) -> bool:
    """Whether C++ computes all products of a layer and their activations."""
    if layer.mixture is None:
        return len(native_products(layer)) == 4
    router = layer.router
    plain = isinstance(router, NativeProduct) and isinstance(layer.mixture, NativeExperts)
    return plain and len(native_products(layer)) == 2


class NativeStack:
    """Decoder layers as one call. This is a `kernels.base.Stack`.

    library: the compiled kernels.
    shape: sizes that all layers share.
    parts: norms and products of each layer.
    """

    def __init__(self, library: ctypes.CDLL, shape: StackShape, parts: Sequence[StackLayer]) -> None:
        self._run = library.fovea_decoder
        self._parts = parts
        self._shape = _Shape(
            shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.eps,
            shape.scale
        )  # fmt: skip
        self._layers = (_Layer * len(parts))()
        for layer, part in zip(self._layers, parts, strict=True):
            norms = (part.input_norm, part.post_norm, part.q_norm, part.k_norm)
            widths = shape.hidden, shape.hidden, shape.head_dim, shape.head_dim
            values = [address(norm, BF16, width) for norm, width in zip(norms, widths, strict=True)]
            products = native_products(part)
            values += [product.weight.address for product in products]
            for field, value in zip(_Layer._fields_, values, strict=False):
                setattr(layer, field[0], value)
            if isinstance(part.router, NativeProduct) and isinstance(part.mixture, NativeExperts):
                layer.router, layer.mixture = part.router.weight.address, part.mixture.address
            else:
                layer.activation = products[2].kind

    def __call__(
        self, x: Tensor, first: int, last: int, cos: Tensor, sin: Tensor, kv: KV, plan: AttentionPlan,
        read: Tensor | None,
    ) -> Tensor:  # fmt: skip
        x = x.clone(memory_format=torch.contiguous_format)
        shape = self._shape
        rows, pages = len(x), pages_struct(kv[first], shape.kv_heads, shape.dim)
        check_plan(plan, rows, *kv.shape[1:3])
        check_numbers("KV slots", plan.slots, 0, kv.shape[1] * kv.shape[2] - 1)
        if any(chunk.limits is not None for chunk in plan.chunks) or any(
            group.firsts is not None for group in plan.decodes
        ):
            raise ValueError(
                "layers in one call have no sliding windows, and no images whose tokens see each other"
            )
        attention = _Attention(
            *(address(part.view(rows, shape.dim), F32, rows, shape.dim) for part in (cos, sin)),
            address(plan.slots, I64, rows), kv.shape[1] * pages.page, 0, 0, None, None, None,
            len(plan.chunks),
        )  # fmt: skip
        if plan.decodes:
            (group,) = plan.decodes
            attention.decodes, attention.table_width = group.tables.shape
            attention.tables, attention.lengths = group.tables.data_ptr(), group.lengths.data_ptr()
            shared = prefix_groups_struct(group)
            if shared is not None:
                attention.shared = ctypes.pointer(shared)
        if plan.chunks:
            chunks = [_Chunk(c.row, c.count, c.first, c.table.data_ptr()) for c in plan.chunks]
            attention.chunk = (_Chunk * len(chunks))(*chunks)
        if read is not None:
            attention.read, attention.reads = address(read, I64, ANY), len(read)
            check_numbers("rows that are read", read, 0, rows - 1)
            if len(read) > rows:
                raise ValueError(f"{len(read)} rows are read, of a step of {rows}")
        else:
            attention.reads = -1
        self._run(
            ctypes.byref(self._layers, first * ctypes.sizeof(_Layer)), last - first,
            ctypes.byref(shape), ctypes.byref(attention), address(x, BF16, rows, shape.hidden), rows,
            ctypes.byref(pages), torch.get_num_threads(),
        )  # fmt: skip
        return x if read is None else x[: len(read)]
