"""Products in C++: a packed weight, and the activation, gate and residual that follow."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fovea.kernels.activation import finish
from fovea.kernels.native.border import BF16, address
from fovea.kernels.native.weights import NativeWeight, weight_rows

ACTIVATIONS = {
    (None, False): 0, ("silu", True): 1, ("gelu_pytorch_tanh", True): 2, ("gelu_new", True): 2,
    ("gelu", True): 3, ("gelu_pytorch_tanh", False): 4, ("gelu_new", False): 4, ("gelu", False): 5,
    ("quick_gelu", False): 6, ("silu", False): 7,
}  # fmt: skip
"""Number of each (activation, gated) that C++ fuses into a product: `Activation` in cpu/kernels.h."""


def fuses(activation: str | None, gated: bool) -> bool:
    """Whether C++ applies the activation. If so, a gated weight has to be packed as a gated one."""
    return (activation, gated) in ACTIVATIONS


class NativeProduct:
    """A product with a packed weight, in C++. Bias, activation, gate and residual are part of it if possible.

    kind: number of the activation that is fused into the product; None: torch applies the activation.
    width: width of the rows that C++ writes.
    """

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
            self.weight.address, address(x, BF16, *x.shape[:-1], self.weight.k), self.weight.k, rows,
            self.kind or 0, address(fused, BF16, *y.shape), y.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return y if self.kind is not None else finish(y, self.activation, self.gated, residual)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, (*ids, k) bfloat16. The weight must not be gated."""
        return weight_rows(self._library, self.weight, ids)
