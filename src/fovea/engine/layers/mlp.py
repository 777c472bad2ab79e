"""Feed-forward blocks. Their last product also adds the residual, if there is one."""

from __future__ import annotations

from torch import Tensor, nn

from fovea.engine.layers.linear import FusedLinear, Linear


class GatedMLP(nn.Module):
    """The block residual + down(act(gate(x)) * up(x)), with gate and up in one product."""

    def __init__(self, hidden: int, intermediate: int, act: str, *, bias: bool) -> None:
        super().__init__()
        outputs = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up = FusedLinear(hidden, outputs, bias=bias, activation=act, gated=True)
        self.down_proj = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.down_proj(self.gate_up(x), residual)  # type: ignore[no-any-return]


class PlainMLP(nn.Module):
    """The block residual + second(act(first(x))). Without a residual, only the second part.

    names: checkpoint names of the two maps.
    """

    def __init__(self, hidden: int, intermediate: int, act: str, names: tuple[str, str]) -> None:
        super().__init__()
        self.maps = names
        self.add_module(names[0], Linear(hidden, intermediate, bias=True, activation=act))
        self.add_module(names[1], Linear(intermediate, hidden, bias=True))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        first, second = (self.get_submodule(name) for name in self.maps)
        return second(first(x), residual)  # type: ignore[no-any-return]
