"""Linear maps whose inputs and outputs are clipped to bounds that the checkpoint stores (Gemma 4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fovea.engine.layers.linear import Linear
from fovea.kernels.activation import ACTIVATIONS, check_activation


class ClippedLinear(nn.Module):
    """A linear map of clipped inputs to clipped outputs. Each bound is one number."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = Linear(in_features, out_features, bias=False)
        self.input_min, self.input_max = _number(), _number()
        self.output_min, self.output_max = _number(), _number()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.clamp(self.input_min, self.input_max))
        return y.clamp(self.output_min, self.output_max)


def _number() -> nn.Parameter:
    return nn.Parameter(torch.empty(()), requires_grad=False)


class ClippedGatedMLP(nn.Module):
    """The block down(act(gate(x)) * up(x)) of clipped maps."""

    def __init__(self, hidden: int, intermediate: int, act: str) -> None:
        super().__init__()
        self.act = check_activation(act)
        self.gate_proj = ClippedLinear(hidden, intermediate)
        self.up_proj = ClippedLinear(hidden, intermediate)
        self.down_proj = ClippedLinear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ACTIVATIONS[self.act](self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]
