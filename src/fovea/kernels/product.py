"""Products in C++: a packed weight, and what follows the product."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fovea.kernels.activation import finish
from fovea.kernels.packed import PackedWeight

ACTIVATIONS = {
    (None, False): 0, ("silu", True): 1, ("gelu_pytorch_tanh", True): 2, ("gelu_new", True): 2, ("gelu", True): 3,
    ("gelu_pytorch_tanh", False): 4, ("gelu_new", False): 4, ("gelu", False): 5, ("quick_gelu", False): 6,
    ("silu", False): 7,
}  # fmt: skip


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
