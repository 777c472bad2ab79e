"""Norms over the last dimension. Their storage is uninitialised until a checkpoint fills it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.kernels.base import Kernels
from fovea.kernels.torch_kernels import PLAIN


class RMSNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467): scale rows to a root mean square of 1, then by a weight per column.

    centered: the factor is 1 + weight, see `Kernels.rms_norm`.
    """

    kernels: Kernels = PLAIN

    def __init__(self, width: int, eps: float, *, centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps
        self.centered = centered

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps, centered=self.centered)


class UnitNorm(nn.Module):
    """RMSNorm without a weight."""

    kernels: Kernels = PLAIN

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.ones: Tensor
        self.register_buffer("ones", torch.ones(width), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.ones, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm (arXiv 1607.06450): torch's `layer_norm` with weight and bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
