"""Inputs of layers with a state: a step of rows with slots, as a layer computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fovea.kernels.states import Decodes, RunTable, StatePlan, StateRun, Wave, state_plan

Shape = tuple[int, int, int, int]
"""Heads of queries and keys, their width, heads of values, and their width."""


def plan_of(slots: Sequence[tuple[int, int]], device: torch.device) -> StatePlan:
    """Return the plan of one token for each pair of slots: before it, and after it."""
    runs = [[StateRun(row, 1, source, ((1, target),))] for row, (source, target) in enumerate(slots)]
    return state_plan(runs, device)


def recorded_plan(slots: Sequence[tuple[int, int]], device: torch.device) -> StatePlan:
    """Return the same plan with all rows as decodes, also those without a slot, as in a recorded step."""
    numbers = torch.tensor([(row, *pair) for row, pair in enumerate(slots)], device=device)
    nothing = torch.zeros(0, dtype=torch.long)
    return StatePlan((Wave(Decodes(*numbers.unbind(1)), ()),), RunTable(nothing, nothing, nothing))


def mix(
    kernels: Any, shape: Shape, plan: StatePlan, rows: int, dtype: torch.dtype, device: torch.device,
    slots: int = 8,
) -> list[Tensor]:  # fmt: skip
    """Compute a convolution, the gated delta rule after it and its norm, with random numbers.

    Returns the outputs of all three, and the states of both.
    """
    key_heads, key_dim, heads, value_dim = shape
    channels, values, width = 2 * key_heads * key_dim + heads * value_dim, heads * value_dim, 4
    random = torch.Generator().manual_seed(rows)

    def draw(*size: int, type: torch.dtype = dtype) -> Tensor:
        return torch.randn(*size, generator=random).to(device, type)

    projected = draw(rows, channels + values + 2 * heads)
    qkv, gate, beta, size = torch.split(projected, [channels, values, heads, heads], dim=-1)
    inputs = draw(slots, width - 1, channels)
    matrices = draw(slots, heads, key_dim, value_dim, type=torch.float32)
    rates = draw(heads, type=torch.float32), 4 * draw(heads, type=torch.float32)
    conv = kernels.short_conv(qkv, draw(width, channels), draw(channels), "silu", inputs, plan)
    out = kernels.gated_delta(conv, beta, size, rates, key_heads, matrices, plan)
    by_head = rows, heads, value_dim
    normal = kernels.gated_norm(out.view(by_head), gate.view(by_head), draw(value_dim), 1e-6)
    return [conv, out, normal, inputs, matrices]
