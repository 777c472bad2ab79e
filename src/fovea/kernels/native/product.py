"""Products in C++: a packed weight, and what follows the product."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fovea.kernels.activation import finish
from fovea.kernels.native.weights import NativeWeight, weight_rows

ACTIVATIONS = {
    (None, False): 0, ("silu", True): 1, ("gelu_pytorch_tanh", True): 2, ("gelu_new", True): 2, ("gelu", True): 3,
    ("gelu_pytorch_tanh", False): 4, ("gelu_new", False): 4, ("gelu", False): 5, ("quick_gelu", False): 6,
    ("silu", False): 7,
}  # fmt: skip


def fuses(activation: str | None, gated: bool) -> bool:
    """Whether C++ applies it; then a gated weight is packed as such."""
    return (activation, gated) in ACTIVATIONS


class NativeProduct:
    """kind: the activation's number, fused into the product; None where torch has to apply it."""

    def __init__(
        self, library: ctypes.CDLL, weight: NativeWeight, activation: str | None, gated: bool
    ) -> None:
        self.kind = ACTIVATIONS.get((activation, gated))
        self.activation, self.gated = activation, gated
        self.weight = weight
        self.width = weight.n // 2 if gated and self.kind is not None else weight.n
        self._library = library

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        x = x.contiguous()
        rows = x.numel() // self.weight.k
        y = x.new_empty((*x.shape[:-1], self.width))
        fused = None if residual is None or self.kind is None else residual.contiguous()
        self._library.fovea_product(
            self.weight.address, x.data_ptr(), self.weight.k, rows, self.kind or 0,
            None if fused is None else fused.data_ptr(), y.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return y if self.kind is not None else finish(y, self.activation, self.gated, residual)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, (*ids, k), as a table that is looked up in."""
        return weight_rows(self._library, self.weight, ids)
