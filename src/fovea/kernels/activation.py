"""Activations by the names that model configurations use, and the steps after a product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fovea.core.errors import UnsupportedModel


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "quick_gelu": _quick_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_new": _tanh_gelu,
}


def check_activation(name: str) -> str:
    """Return the name. Raises UnsupportedModel if the table has no such activation."""
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return name


def finish(y: Tensor, activation: str | None, gated: bool, residual: Tensor | None) -> Tensor:
    """Return y (..., n) after the steps that follow a product: activation, gate, residual.

    gated: the activated first half of the outputs scales the second half, so the result is (..., n / 2).
    residual: added last; its shape is that of the result.
    """
    if gated and activation is not None:
        gate, up = y.chunk(2, dim=-1)
        y = ACTIVATIONS[activation](gate) * up
    elif activation is not None:
        y = ACTIVATIONS[activation](y)
    return y if residual is None else residual + y
