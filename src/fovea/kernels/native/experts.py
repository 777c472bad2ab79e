"""A mixture of experts as one call of the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from fovea.kernels.native.border import ANY, BF16, address
from fovea.kernels.native.product import NativeProduct


class MixtureStruct(ctypes.Structure):
    """The experts as C++ reads them. The fields have the order of `Mixture` in cpu/kernels.h."""

    _fields_ = [
        ("gate_up", c_void_p), ("down", c_void_p), ("experts", c_int64), ("active", c_int64),
        ("activation", c_int64),
    ]  # fmt: skip


class NativeExperts:
    """The experts of a layer as one call. This is a `kernels.base.Mixture`.

    library: the compiled kernels.
    gate_up, down: both products of each expert. All gate_up have one shape and one format, and so have all
        down.
    active: experts per row.
    address: address of the structure that C++ reads. It is valid as long as this object lives.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        gate_up: Sequence[NativeProduct],
        down: Sequence[NativeProduct],
        active: int,
    ) -> None:
        self._library = library
        self._products = gate_up, down  # their addresses are valid as long as they live
        self._hidden = gate_up[0].weight.k
        if len(gate_up) != len(down):
            raise ValueError(
                f"each expert needs both products, got {len(gate_up)} gate_up and {len(down)} down"
            )
        if not 0 < active <= len(gate_up):
            raise ValueError(
                f"the active experts of a row must be from 1 to all {len(gate_up)} experts, got {active}"
            )
        self._tables = _addresses(gate_up), _addresses(down)
        first, second = map(ctypes.addressof, self._tables)
        self._struct = MixtureStruct(first, second, len(gate_up), active, gate_up[0].kind)
        self.address = ctypes.addressof(self._struct)

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor | None) -> Tensor:
        x, logits = x.contiguous(), logits.contiguous()
        residual = None if residual is None else residual.contiguous()
        out, experts = torch.empty_like(x), len(self._products[0])
        self._library.fovea_experts(
            self.address, address(x, BF16, ANY, self._hidden), len(x), address(logits, BF16, len(x), experts),
            address(residual, BF16, *x.shape), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


def _addresses(products: Sequence[NativeProduct]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(products))(*(product.weight.address for product in products))
