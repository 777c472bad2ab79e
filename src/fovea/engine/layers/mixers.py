"""The mixers of decoder layers: attention over paged KV, Gated DeltaNet, short convolutions.

A mixer works in three parts. `project` computes what each row contributes. `mix` lets the rows of a sequence
exchange information, through memory. `output` maps back to the width between layers and adds the residual.
Only `mix` depends on other rows. Each mixer's attribute names are those of the checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import Attention, DecoderConfig, GatedDelta, Rotary, ShortConv
from fovea.engine.layers.linear import FusedLinear, Linear, RMSNorm, UnitNorm, parameter, plain_weight
from fovea.engine.layers.step import Step
from fovea.kernels.base import Kernels
from fovea.kernels.codes import Format
from fovea.kernels.pages import KV
from fovea.kernels.torch_kernels import PLAIN

MOST_DOUBLINGS = 8
"""Exponent of the largest factor of `QueryKeyValue.balance`."""


class Mixer(Protocol):
    """The part of a layer in which rows of one sequence exchange information."""

    def project(self, x: Tensor) -> Tensor:
        """Map normalised rows (T, hidden) to what `mix` reads, (T, n)."""
        ...

    def mix(self, projected: Tensor, step: Step) -> Tensor:
        """Exchange information, and write keys and values or states. Returns (T, m)."""
        ...

    def output(self, mixed: Tensor, residual: Tensor | None) -> Tensor:
        """Map rows (T, m) to (T, hidden) and add the residual."""
        ...


class QueryKeyValue(FusedLinear):
    """The input projection of attention: queries, keys, values and gates, as far as the layer has them.

    With gates, a checkpoint's q_proj holds the queries and the gates of each head next to each other.

    rotated: numbers of a head that the rotation turns.
    balances: whether `pack` balances keys that have biases, see `balance`.
    """

    def __init__(self, hidden: int, config: Attention, rotated: int) -> None:
        self.query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        outputs = {"q_proj": self.query}
        if config.source is None:
            outputs |= {"k_proj": key} if config.shared_values else {"k_proj": key, "v_proj": key}
        self.heads = config.heads
        self.has_gates = config.gated
        self.shape, self.rotated = config, rotated
        self.balances = False
        self.pairs = rotated // 2 if config.pairs else 0
        if config.pairs:
            assert config.head_dim % rotated == 0
            assert not any((config.gated, config.qk_norm, config.shared_values))
        super().__init__(
            hidden, outputs | ({"gate": self.query} if config.gated else {}), bias=config.qkv_bias
        )

    def pack(self, kernels: Kernels, format: Format | None = None, *, keep: bool = False) -> None:
        if self.balances and self.product is None:
            self.balances = False
            self.balance()
        super().pack(kernels, format, keep=keep)

    def balance(self) -> None:
        """Divide numbers of keys that have large biases, and multiply the same numbers of queries.

        Keys in 8 bits have one scale per head. In Qwen2 and Qwen2.5 some numbers of a key have biases of
        hundreds, and all others would be rounded to multiples of 2. The expected magnitude of a number is its
        bias plus three times the norm of its weights; a number with a magnitude above the median is divided
        by their ratio, as SmoothQuant (arXiv 2211.10438) does with the inputs of products. Numbers that are
        rotated together have the same factor, so the rotation does not change it. Factors are powers of two,
        so scores of keys that are not rounded keep their bits.
        """
        if self.bias is None or self.shape.qk_norm or self.shape.source is not None:
            return
        heads, dim, query = self.shape.kv_heads, self.shape.head_dim, self.query
        weight = plain_weight(self.codes, self.weight) if self.codes else self.weight.data
        keys = slice(query, query + heads * dim)
        norms = weight[keys].float().square().sum(-1).view(heads, dim)
        biases = self.bias.data[keys].float().square().view(heads, dim)
        half = self.rotated // 2
        for squares in (norms, biases):
            squares[:, :half] = squares[:, half : 2 * half] = squares[:, :half] + squares[:, half : 2 * half]
        magnitude = biases.sqrt() + 3 * (norms / 2).sqrt()
        ratio = magnitude / magnitude.median().clamp(min=1e-30)
        factors = torch.exp2(ratio.log2().round().clamp(0, MOST_DOUBLINGS))
        if not bool((factors > 1).any()):
            return
        rows = torch.ones(self.out_features, device=weight.device)
        grouped = factors[:, None].expand(heads, self.heads // heads, dim)
        rows[:query], rows[keys] = grouped.reshape(-1), 1 / factors.reshape(-1)
        self.bias.data *= rows.to(self.bias.dtype)
        if not self.codes:
            self.weight.data *= rows.to(weight.dtype)[:, None]
            return
        parts = torch.split(rows, [len(part.codes) for part in self.codes])
        self.codes = [codes.times(own) for codes, own in zip(self.codes, parts, strict=True)]

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        if not self.has_gates:
            for name, tensor in super().checkpoint_views():
                in_pairs = self.pairs and name.startswith(("../q_proj.", "../k_proj."))
                yield name, self._in_pairs(tensor) if in_pairs else tensor
            return
        for name, tensor in super().checkpoint_views():
            if not name.startswith(("../gate.", "../q_proj.")):
                yield name, tensor
        yield "../q_proj.weight", self._queries_and_gates(self.weight.data)
        if self.bias is not None:
            yield "../q_proj.bias", self._queries_and_gates(self.bias.data)

    def _in_pairs(self, rows: Tensor) -> Tensor:
        """View the rows of queries or keys in a checkpoint's order: (groups, pairs, 2, ...).

        A head consists of groups, each as long as the rotated part. Only the first group is rotated. The
        others are reordered like it, so that one view is enough. This does not change scores, because queries
        and keys have the same order.
        """
        return rows.view(-1, 2, self.pairs, *rows.shape[1:]).transpose(1, 2)

    def _queries_and_gates(self, storage: Tensor) -> Tensor:
        """View the rows of queries and gates as (heads, 2, head_dim, ...)."""
        row = storage.stride(0)
        per_head = self.query // self.heads
        gates = self.out_features - self.query
        rest = storage.shape[1:]
        return storage.as_strided(
            (self.heads, 2, per_head, *rest), (per_head * row, gates * row, row, *storage.stride()[1:])
        )


class AttentionMixer(nn.Module):
    """Grouped-query attention over the paged KV cache.

    number: number of the layer in the decoder. group: number of its KV group.
    """

    kernels: Kernels = PLAIN

    def __init__(self, config: DecoderConfig, shape: Attention, number: int, group: int) -> None:
        super().__init__()
        self.shape, self.number, self.group = shape, number, group
        self.heads, self.kv_heads, self.dim = shape.heads, shape.kv_heads, shape.head_dim
        self.scale, self.eps, self.centered = shape.scale, config.eps, config.centered_norms
        query = shape.heads * shape.head_dim
        rotated = 2 * len(config.rotaries[shape.rotary].inverse)
        self.qkv = QueryKeyValue(config.hidden, shape, rotated)
        self.o_proj = Linear(query, config.hidden, bias=shape.out_bias)
        self.q_norm = self._norm() if shape.qk_norm else None
        self.k_norm = self._norm() if shape.qk_norm and shape.source is None else None
        self.v_norm = UnitNorm(self.dim, self.eps) if shape.value_norm and shape.source is None else None

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.dim, self.eps, centered=self.centered)

    def project(self, x: Tensor) -> Tensor:
        return self.qkv(x)  # type: ignore[no-any-return]

    def mix(self, projected: Tensor, step: Step) -> Tensor:
        gate = None
        if self.shape.gated:
            width = self.heads * self.dim
            projected, gate = projected[:, :-width], projected[:, -width:]
        kv, plan = step.memory.layer_kv(self.number), step.plan.attention[self.group]
        angles = step.angles[self.shape.rotary]
        own = self.shape.source is None
        query = self.store(projected, kv if own else None, *angles, plan.slots if own else None)
        if step.query_scale is not None:
            query = query * step.query_scale
        if step.watch is not None:
            step.watch(self.number, query)
        mixed = self.kernels.attend(query, kv, plan, self.scale).reshape(len(projected), -1)
        return mixed if gate is None else self.kernels.open(mixed, gate)

    def store(self, qkv: Tensor, kv: KV | None, cos: Tensor, sin: Tensor, slots: Tensor | None) -> Tensor:
        """Store the keys and values of T rows. Returns their queries, (T, heads, head_dim).

        qkv: (T, n), the heads of queries, keys and values as far as the layer has them, neither normalised
            nor rotated.
        kv: KV cache of this layer, (blocks, block_size, 2, kv_heads, head_dim); None: the layer reads keys
            and values of another, so there are only queries.
        """
        norms = None
        if self.q_norm is not None:
            norms = self.q_norm.weight, (self.k_norm or self.q_norm).weight
        return self.kernels.rotate_store(
            qkv.view(len(qkv), -1, self.dim),
            self.heads,
            cos,
            sin,
            norms,
            self.eps,
            kv,
            slots,
            centered=self.centered,
            value_norm=None if self.v_norm is None else self.v_norm.ones,
        )

    def output(self, mixed: Tensor, residual: Tensor | None) -> Tensor:
        return self.o_proj(mixed, residual)  # type: ignore[no-any-return]


def mrope_axes(sections: Sequence[int], *, interleaved: bool) -> list[int]:
    """Coordinate (0 time, 1 height, 2 width) of each of the sum(sections) frequencies.

    M-RoPE gives each rotary frequency one of three coordinates (time, height, width). Qwen2-VL and
    Qwen2.5-VL divide the frequencies into three runs; Qwen3-VL assigns them alternately. `mrope_axes`
    writes both layouts as one index per frequency, so that the code after it is the same for both.

    sections: number of frequencies of each coordinate.
    interleaved: Qwen3-VL's layout instead of three runs.

    Raises UnsupportedModel if there are not three sections.
    """
    if len(sections) != 3:
        raise UnsupportedModel(f"mrope_section must have 3 numbers, got {list(sections)}")
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        # Sections of the layout in runs, such as 16, 24 and 24, are longer than what is there to alternate.
        for index in range(axis, min(sections[axis] * 3, len(axes)), 3):
            axes[index] = axis
    return axes


class RotaryAngles(nn.Module):
    """Cosines and sines of the rotary angles of rows."""

    def __init__(self, config: Rotary) -> None:
        super().__init__()
        self.scaling = config.scaling
        self.inverse: Tensor
        self.axes: Tensor | None
        inverse = torch.tensor(config.inverse, dtype=torch.float32)
        axes = None if config.axes is None else torch.tensor(config.axes)
        self.register_buffer("inverse", inverse, persistent=False)
        self.register_buffer("axes", axes, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute cos and sin, (T, 1, rotated numbers) in float32, with values rounded to `dtype`.

        The checkpoints' own code rounds them, so the weights were trained with rounded values.

        positions: (T,) or (3, T).
        """
        if self.axes is not None:
            along = positions[self.axes].transpose(0, 1).float()
        else:
            along = positions[:, None].float()
        angles = along * self.inverse
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return cos.to(dtype).float(), sin.to(dtype).float()


class Convolution(nn.Module):
    """Weights of a convolution over the tokens of a sequence, each channel by itself: (width, channels)."""

    def __init__(self, channels: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = parameter(width, channels)
        self.bias = parameter(channels) if bias else None

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight.data.T[:, None]
        if self.bias is not None:
            yield "bias", self.bias.data


class DeltaMixer(nn.Module):
    """Gated DeltaNet (arXiv 2412.06464), as in Qwen3.5. number: number of the layer in the decoder."""

    kernels: Kernels = PLAIN

    def __init__(self, config: DecoderConfig, shape: GatedDelta, number: int) -> None:
        super().__init__()
        self.shape, self.number, self.eps = shape, number, config.eps
        values = shape.value_heads * shape.value_dim
        outputs = {
            "in_proj_qkv": shape.channels,
            "in_proj_z": values,
            "in_proj_b": shape.value_heads,
            "in_proj_a": shape.value_heads,
        }
        self.widths = list(outputs.values())
        self.in_proj = FusedLinear(config.hidden, outputs, bias=False)
        self.conv1d = Convolution(shape.channels, shape.kernel, bias=False)
        # Decays are exponentials of exponentials, so their parameters are float32 in every model.
        self.A_log = nn.Parameter(torch.empty(shape.value_heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(shape.value_heads, dtype=torch.float32), requires_grad=False)
        self.norm = RMSNorm(shape.value_dim, config.eps)
        self.out_proj = Linear(values, config.hidden, bias=False)

    def project(self, x: Tensor) -> Tensor:
        return self.in_proj(x)  # type: ignore[no-any-return]

    def mix(self, projected: Tensor, step: Step) -> Tensor:
        shape, plan = self.shape, step.plan.states
        assert plan is not None
        qkv, gate, beta, size = torch.split(projected, self.widths, dim=-1)
        inputs, matrices = step.memory.layer_states(self.number)
        qkv = self.kernels.short_conv(qkv, self.conv1d.weight, None, shape.activation, inputs, plan)
        rates = self.A_log, self.dt_bias
        out = self.kernels.gated_delta(qkv, beta, size, rates, shape.key_heads, matrices, plan)
        heads = len(out), shape.value_heads, shape.value_dim
        normal = self.kernels.gated_norm(out.view(heads), gate.view(heads), self.norm.weight, self.eps)
        return normal.view(out.shape)

    def output(self, mixed: Tensor, residual: Tensor | None) -> Tensor:
        return self.out_proj(mixed, residual)  # type: ignore[no-any-return]


class ConvMixer(nn.Module):
    """The gated short convolution of LFM2. number: number of the layer in the decoder."""

    kernels: Kernels = PLAIN

    def __init__(self, config: DecoderConfig, shape: ShortConv, number: int) -> None:
        super().__init__()
        self.number = number
        channels = shape.channels or config.hidden
        self.in_proj = Linear(config.hidden, 3 * channels, bias=shape.bias)
        self.conv = Convolution(channels, shape.kernel, bias=shape.bias)
        self.out_proj = Linear(channels, config.hidden, bias=shape.bias)

    def project(self, x: Tensor) -> Tensor:
        return self.in_proj(x)  # type: ignore[no-any-return]

    def mix(self, projected: Tensor, step: Step) -> Tensor:
        assert step.plan.states is not None
        before, after, x = projected.chunk(3, dim=-1)
        (inputs,) = step.memory.layer_states(self.number)
        bias = self.conv.bias
        mixed = self.kernels.short_conv(before * x, self.conv.weight, bias, None, inputs, step.plan.states)
        return after * mixed

    def output(self, mixed: Tensor, residual: Tensor | None) -> Tensor:
        return self.out_proj(mixed, residual)  # type: ignore[no-any-return]
