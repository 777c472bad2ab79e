"""Feed-forward blocks."""

from __future__ import annotations

from torch import Tensor, nn

from fovea.engine.layers.activation import activation
from fovea.engine.layers.linear import FusedLinear, Linear


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, hidden: int, intermediate: int, act: str, *, bias: bool) -> None:
        super().__init__()
        self.gate_up = FusedLinear(hidden, {"gate_proj": intermediate, "up_proj": intermediate}, bias=bias)
        self.down_proj = Linear(intermediate, hidden, bias=bias)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)  # type: ignore[no-any-return]


class PlainMLP(nn.Module):
    """second(act(first(x))). `names` are what the checkpoints call the two maps."""

    def __init__(self, hidden: int, intermediate: int, act: str, names: tuple[str, str]) -> None:
        super().__init__()
        first, second = Linear(hidden, intermediate, bias=True), Linear(intermediate, hidden, bias=True)
        self.maps = names
        self.add_module(names[0], first)
        self.add_module(names[1], second)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.get_submodule(name) for name in self.maps)
        return second(self.act(first(x)))  # type: ignore[no-any-return]
