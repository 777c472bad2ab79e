"""Layers with a state in torch: short convolutions and the gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels.activation import ACTIVATIONS
from fovea.kernels.slots import NOTHING
from fovea.kernels.states import Decodes, StatePlan, StateRun

CHUNK = 64
"""Tokens of a prompt that are computed together by the gated delta rule."""
NORM_EPS = 1e-6
"""Constant of the norms of queries and keys, as in the code that the models were trained with."""


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor, plan: StatePlan
) -> Tensor:
    """See `kernels.base.Kernels.short_conv`."""
    out = torch.empty_like(x)
    for wave in plan.waves:
        if wave.decodes is not None:
            _conv_decodes(x, weight, bias, state, wave.decodes, out)
        for run in wave.runs:
            _conv_run(x, weight, bias, state, run, out)
    return out if activation is None else ACTIVATIONS[activation](out)


def _conv_decodes(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, decodes: Decodes, out: Tensor
) -> None:
    window = torch.cat((state[decodes.sources], x[decodes.rows][:, None]), dim=1)
    sums = (window.float() * weight.float()).sum(1)
    out[decodes.rows] = (sums if bias is None else sums + bias.float()).to(x.dtype)
    state[decodes.targets] = window[:, 1:]


def _conv_run(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, run: StateRun, out: Tensor
) -> None:
    rows, kept = slice(run.row, run.row + run.count), weight.shape[0] - 1
    before = x.new_zeros((kept, x.shape[1])) if run.source == NOTHING else state[run.source]
    inputs = torch.cat((before, x[rows]))
    sums = functional.conv1d(
        inputs.float().T[None],
        weight.float().T[:, None],
        None if bias is None else bias.float(),
        groups=weight.shape[1],
    )
    out[rows] = sums[0].T.to(x.dtype)
    for tokens, slot in run.saves:
        state[slot] = inputs[tokens : tokens + kept]


def gated_delta(
    qkv: Tensor,
    beta: Tensor,
    step: Tensor,
    rates: tuple[Tensor, Tensor],
    key_heads: int,
    state: Tensor,
    plan: StatePlan,
) -> Tensor:
    """See `kernels.base.Kernels.gated_delta`."""
    rows = qkv.shape[0]
    value_heads, key_dim, value_dim = state.shape[1:]
    decay = -rates[0].exp() * functional.softplus(step + rates[1])
    keys = key_heads * key_dim
    wide = qkv.float()
    query, key, value = wide[:, :keys], wide[:, keys : 2 * keys], wide[:, 2 * keys :]
    group = value_heads // key_heads
    query, key = (
        _normal(part.view(rows, key_heads, key_dim)).repeat_interleave(group, dim=1) for part in (query, key)
    )
    query = query * key_dim**-0.5
    value = value.reshape(rows, value_heads, value_dim)
    out = value.new_empty(value.shape)
    for wave in plan.waves:
        if wave.decodes is not None:
            tokens, before = wave.decodes.rows, state[wave.decodes.sources]
            out[tokens], after = _one_token(
                query[tokens], key[tokens], value[tokens], beta[tokens], decay[tokens], before
            )
            state[wave.decodes.targets] = after
        for run in wave.runs:
            matrix = torch.zeros_like(state[0]) if run.source == NOTHING else state[run.source].clone()
            for part, slots in run.segments():
                for start in range(part.start, part.stop, CHUNK):
                    at = slice(start, min(start + CHUNK, part.stop))
                    out[at], matrix = _chunk(query[at], key[at], value[at], beta[at], decay[at], matrix)
                for slot in slots:
                    state[slot] = matrix
    result: Tensor = out.view(rows, -1).to(qkv.dtype)
    return result


def _normal(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one token of each of B sequences.

    query, key: (B, heads, key_dim). value: (B, heads, value_dim). beta, decay: (B, heads).
    state: (B, heads, key_dim, value_dim), before the tokens.

    Returns the outputs, shaped like `value`, and the states after the tokens.
    """
    state = state * decay.exp()[..., None, None]
    predicted = torch.einsum("bhk,bhkv->bhv", key, state)
    change = (value - predicted) * beta[..., None]
    state = state + key[..., None] * change[..., None, :]
    return torch.einsum("bhk,bhkv->bhv", query, state), state


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute T consecutive tokens of one sequence with products of matrices (arXiv 2412.06464, section 3.3).

    Each token corrects the state by the part of its value that the state does not predict yet. So a
    correction depends on those of earlier tokens, and together they solve a triangular system.

    query, key: (T, heads, key_dim). value: (T, heads, value_dim). beta, decay: (T, heads).
    state: (heads, key_dim, value_dim).

    Returns the outputs, shaped like `value`, and the state after the tokens.
    """
    query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    beta, total = beta.transpose(0, 1), decay.transpose(0, 1).cumsum(-1)
    length = total.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=key.device).triu(1)
    # Decay between two tokens of the chunk: from token j to a later token i.
    between = (total[:, :, None] - total[:, None, :]).masked_fill(later, float("-inf")).exp()
    from_start = total.exp()[..., None]
    scaled = key * beta[..., None]
    system = (scaled @ key.transpose(1, 2)) * between
    wanted = torch.cat((value * beta[..., None], scaled * from_start), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    changes = solved[..., : value.shape[-1]] - solved[..., value.shape[-1] :] @ state
    inside = (query @ key.transpose(1, 2)) * between
    out = (query * from_start) @ state + inside @ changes
    left = (total[:, -1:] - total).exp()[..., None]
    state = state * total[:, -1, None, None].exp() + (key * left).transpose(1, 2) @ changes
    return out.transpose(0, 1), state
