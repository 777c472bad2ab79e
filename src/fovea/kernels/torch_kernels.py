"""The kernels in torch, which run everywhere. On a CPU their weights can be in oneDNN's layout.

The second part are layers with a state: short convolutions and the gated delta rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels import NO_SLOT, reference
from fovea.kernels.activation import ACTIVATIONS, finish
from fovea.kernels.attention import Heads, attend
from fovea.kernels.base import GroupedProduct, Mixture, Product, Stack, StackLayer, StackShape, TableProduct
from fovea.kernels.codes import CodedProduct, Codes, Format
from fovea.kernels.float8 import FP8, Fp8Product
from fovea.kernels.native.instruction_sets import has_bf16_units
from fovea.kernels.pages import FP8 as KV_FP8
from fovea.kernels.pages import INT8 as KV_INT8
from fovea.kernels.pages import KV, store
from fovea.kernels.pieces import Cutting
from fovea.kernels.quantize import quantized_product
from fovea.kernels.spans import attend_each
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
            conv_run(x, weight, bias, state, run, out)
    return out if activation is None else ACTIVATIONS[activation](out)


def _conv_decodes(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, decodes: Decodes, out: Tensor
) -> None:
    window = torch.cat((state[decodes.sources], x[decodes.rows][:, None]), dim=1)
    sums = (window.float() * weight.float()).sum(1)
    out[decodes.rows] = (sums if bias is None else sums + bias.float()).to(x.dtype)
    state[decodes.targets] = window[:, 1:]


def conv_run(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, run: StateRun, out: Tensor
) -> None:
    """Convolve the tokens of one run, without the activation. Writes their rows of `out`."""
    rows, kept = slice(run.row, run.row + run.count), weight.shape[0] - 1
    before = x.new_zeros((kept, x.shape[1])) if run.source == NO_SLOT else state[run.source]
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
    qkv: Tensor, beta: Tensor, step: Tensor, rates: tuple[Tensor, Tensor], key_heads: int, state: Tensor,
    plan: StatePlan, decode: Callable[[Decodes, Tensor], None] | None = None,
) -> Tensor:  # fmt: skip
    """See `kernels.base.Kernels.gated_delta`.

    decode: computes single tokens, and writes their rows of a tensor (T, value_heads, value_dim); None:
        torch computes them.
    """
    rows = qkv.shape[0]
    value_heads, key_dim, value_dim = state.shape[1:]
    beta, step = beta.sigmoid().float(), step.float()
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
        if wave.decodes is not None and decode is not None:
            decode(wave.decodes, out)
        elif wave.decodes is not None:
            tokens, before = wave.decodes.rows, state[wave.decodes.sources]
            out[tokens], after = _one_token(
                query[tokens], key[tokens], value[tokens], beta[tokens], decay[tokens], before
            )
            state[wave.decodes.targets] = after
        for run in wave.runs:
            matrix = torch.zeros_like(state[0]) if run.source == NO_SLOT else state[run.source].clone()
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


def open_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See `kernels.base.Kernels.open`."""
    return x * gate.sigmoid()


def choose_experts(
    logits: Tensor, active: int, *, normalized: bool, scaling: float = 1.0, factors: Tensor | None = None,
    opening: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """See `kernels.base.Kernels.choose_experts`."""
    weights, chosen = logits.softmax(dim=-1, dtype=torch.float32).topk(active, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True) if normalized else weights * scaling
    if factors is not None:
        weights = weights * factors[chosen]
    opened = None if opening is None else functional.linear(*opening).sigmoid()
    return weights.to(logits.dtype), chosen, opened


def sum_experts(
    outputs: Tensor, weights: Tensor, shared: Tensor | None = None, opened: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `kernels.base.Kernels.sum_experts`."""
    out = (outputs * weights[..., None]).sum(1)
    if shared is not None:
        out = out + (shared if opened is None else opened * shared)
    return out if residual is None else residual + out


class TorchKernels:
    """Implements all of `kernels.base.Kernels`, on every device and in every float type."""

    least_shared_rows = 4
    sharing_rounds = False
    kv_formats = KV_INT8, KV_FP8
    attend = staticmethod(attend)
    attend_spans = staticmethod(attend_each)
    spans_in_one_launch = False
    joins_rows = False
    gated_norm = staticmethod(reference.gated_norm)
    short_conv = staticmethod(short_conv)
    gated_delta = staticmethod(gated_delta)
    open = staticmethod(open_gate)
    choose_experts = staticmethod(choose_experts)
    sum_experts = staticmethod(sum_experts)

    def __init__(self, *, pack: bool = False) -> None:
        """pack: keep weights in the layout that oneDNN multiplies fastest (on a CPU only)."""
        self._pack = pack

    @property
    def plain(self) -> bool:
        return not self._pack

    @property
    def groups_experts(self) -> bool:
        return not self._pack

    def product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool
    ) -> Product | None:
        if not (self._pack and _can_pack(weight)):
            return None
        # Reordered once instead of in every call. This raises the rate of a product from two thirds of the
        # memory's bandwidth to nearly all of it.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)

        def apply(x: Tensor, residual: Tensor | None) -> Tensor:
            y = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return finish(y, activation, gated, residual)

        return apply

    def quantized_product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, format: Format
    ) -> TableProduct:
        if format is FP8:
            return Fp8Product(weight, bias, activation, gated)
        return quantized_product(weight, bias, activation, gated, format)

    def coded_product(
        self,
        parts: Sequence[Codes],
        bias: Tensor | None,
        activation: str | None,
        gated: bool,
        dtype: torch.dtype,
    ) -> TableProduct | None:
        return CodedProduct(parts, bias, activation, gated)

    def grouped_product(
        self, weights: Tensor, activation: str | None, gated: bool, format: Format | None
    ) -> GroupedProduct | None:
        return None

    def stack(self, shape: StackShape, layers: Sequence[StackLayer]) -> Stack | None:
        return None

    def mixture(self, gate_up: Sequence[Product], down: Sequence[Product], active: int) -> Mixture | None:
        return None

    def attends_in_place(self, head_dim: int, *, window: bool = False) -> bool:
        return False

    def cutting(self, heads: Heads) -> Cutting | None:
        return None

    def shared_rows(self, group: int) -> int:
        return 0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, centered: bool = False) -> Tensor:
        if centered:
            return reference.centered_rms_norm(x, weight, eps)
        return reference.rms_norm(x, weight, eps)

    def rotate(self, x: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
        x[:, :count] = reference.rotate(x[:, :count], cos, sin)
        return x

    def add_norm(
        self, x: Tensor, y: Tensor, inner: Tensor | None, outer: Tensor | None, eps: float, *,
        centered: bool = False, factor: Tensor | None = None, gate: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return add_norm(self.rms_norm, x, y, inner, outer, eps, centered=centered, factor=factor, gate=gate)

    def rotate_store(
        self, qkv: Tensor, heads: int, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None,
        eps: float, kv: KV | None, slots: Tensor | None, *, centered: bool = False,
        value_norm: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if kv is None or slots is None:
            query = qkv if norms is None else self.rms_norm(qkv, norms[0], eps, centered=centered)
            return reference.rotate(query, cos, sin)
        qkv = with_values(self.rms_norm, qkv, heads, kv.shape[3], value_norm, eps)
        rotated_heads = heads + kv.shape[3]
        qk, value = qkv[:, :rotated_heads], qkv[:, rotated_heads:]
        if norms is not None:
            parts = zip((qk[:, :heads], qk[:, heads:]), norms, strict=True)
            qk = torch.cat(
                [self.rms_norm(part, weight, eps, centered=centered) for part, weight in parts], dim=1
            )
        qk = reference.rotate(qk, cos, sin)
        store(kv, torch.stack((qk[:, heads:], value), dim=1), slots)
        return qk[:, :heads]

    def attend_groups(self, qkv: Tensor, groups: int, heads: int, part: slice, out: Tensor) -> None:
        rows = qkv.view(groups, -1, 3, heads, qkv.shape[2])[:, :, :, part]
        output = functional.scaled_dot_product_attention(*rows.permute(2, 0, 3, 1, 4))
        out.view(groups, -1, heads, qkv.shape[2])[:, :, part] = output.transpose(1, 2)


def add_norm(
    norm: Callable[..., Tensor], x: Tensor, y: Tensor, inner: Tensor | None, outer: Tensor | None,
    eps: float, *, centered: bool, factor: Tensor | None, gate: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Do the work of `kernels.base.Kernels.add_norm` in steps. norm: the `rms_norm` of a set of kernels."""
    added = y if inner is None else norm(y, inner, eps, centered=centered)
    total = x + (added if gate is None else gate.tanh() * added)
    if factor is not None:
        total = total * factor
    return total, total if outer is None else norm(total, outer, eps, centered=centered)


def with_values(
    norm: Callable[..., Tensor], qkv: Tensor, heads: int, kv_heads: int, weight: Tensor | None, eps: float
) -> Tensor:
    """Add the values to rows of queries and keys, or normalise the values that are there.

    norm: the `rms_norm` of a set of kernels. weight: of the norm of values; None: they have none.
    """
    if weight is None and qkv.shape[1] == heads + 2 * kv_heads:
        return qkv
    values = qkv[:, -kv_heads:]
    if weight is not None:
        values = norm(values, weight, eps)
    return torch.cat((qkv[:, : heads + kv_heads], values), dim=1)


def _can_pack(weight: Tensor) -> bool:
    """Whether torch has a packed product for the weight's type and shape on this machine."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn or weight.shape[1] < 2:
        return False
    if weight.dtype is torch.bfloat16:
        return has_bf16_units() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


PLAIN = TorchKernels()
