"""A mixture of experts as one call of the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p

import torch
from torch import Tensor

from fovea.kernels.native.product import NativeProduct


class NativeExperts:
    """The experts of a layer as one call. This is a `kernels.base.Mixture`.

    library: the compiled kernels.
    gate_up, down: both products of each expert. All of one kind have the same shape and the same format.
    """

    def __init__(
        self, library: ctypes.CDLL, gate_up: Sequence[NativeProduct], down: Sequence[NativeProduct]
    ) -> None:
        self._library = library
        self._products = gate_up, down  # their addresses are valid as long as they live
        self._gate_up = _addresses(gate_up)
        self._down = _addresses(down)
        self._kind = gate_up[0].kind

    def __call__(self, x: Tensor, logits: Tensor, active: int, residual: Tensor | None) -> Tensor:
        x, logits = x.contiguous(), logits.contiguous()
        residual = None if residual is None else residual.contiguous()
        out = torch.empty_like(x)
        self._library.fovea_experts(
            self._gate_up, self._down, len(self._gate_up), active, self._kind, x.data_ptr(), len(x),
            logits.data_ptr(), None if residual is None else residual.data_ptr(), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out


def _addresses(products: Sequence[NativeProduct]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(products))(*(product.weight.address for product in products))
