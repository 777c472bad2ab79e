"""One decoder layer: a mixer and a feed-forward block, each after a norm; also layers that read images.

`CrossLayer` lets text attend to the states of images, `PerLayerInput` gives a layer a small input of its
own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fovea.engine.layers.config import (
    Attention,
    CrossAttention,
    DecoderConfig,
    Dense,
    Experts,
    FeedForward,
    GatedDelta,
    LayerConfig,
    PerLayer,
    ShortConv,
)
from fovea.engine.layers.experts import DenseBesideExperts, ExpertsBlock
from fovea.engine.layers.linear import Embedding, GatedMLP, Linear, RMSNorm, parameter
from fovea.engine.layers.mixers import AttentionMixer, ConvMixer, DeltaMixer, Mixer
from fovea.engine.layers.step import ImageRows, Step
from fovea.kernels.base import Kernels, StackLayer
from fovea.kernels.torch_kernels import PLAIN


class Layer(nn.Module):
    """One decoder layer. The attribute of its mixer is named as in checkpoints."""

    kernels: Kernels = PLAIN
    rowwise = ("before", "after")

    def __init__(self, config: DecoderConfig, shape: LayerConfig, number: int) -> None:
        super().__init__()
        self.number, self.eps, self.centered = number, config.eps, config.centered_norms
        self.input_layernorm = _norm(config)
        mixer = shape.mixer
        if isinstance(mixer, Attention):
            place = config.places[number]
            assert isinstance(place, tuple)
            self.self_attn = AttentionMixer(config, mixer, number, place[0])
        elif isinstance(mixer, GatedDelta):
            self.linear_attn = DeltaMixer(config, mixer, number)
        else:
            assert isinstance(mixer, ShortConv)
            self.conv = ConvMixer(config, mixer, number)
        self.post_attention_layernorm = _norm(config)
        block = shape.feed_forward
        self.mlp = _feed_forward(config, block)
        beside = isinstance(block, Experts) and block.dense > 0
        self.pre_feedforward_layernorm = _norm(config) if shape.sandwich and not beside else None
        self.post_feedforward_layernorm = _norm(config) if shape.sandwich else None
        per_layer = config.per_layer
        self.per_layer = None if per_layer is None else PerLayerInput(config.hidden, per_layer, config.eps)
        self.layer_scalar = parameter(1) if shape.scaled else None

    @property
    def mixer(self) -> Mixer:
        """The layer's mixer, whichever kind it is."""
        children = self._modules
        mixer: Mixer = next(
            children[name] for name in ("self_attn", "linear_attn", "conv") if name in children
        )  # type: ignore[assignment]
        return mixer

    def forward(self, x: Tensor, step: Step, read: Tensor | None = None) -> Tensor:
        """Compute the layer on rows x (T, hidden).

        read: numbers of the rows whose results are returned; None: all. All rows are written to memory.
        """
        mixed = self.mixer.mix(self.before(x), step)
        own = None if step.per_layer is None else step.per_layer[:, self.number]
        if read is None:
            return self.after(mixed, x, own)
        if not len(read):
            return x[:0]
        return self.after(mixed[read], x[read], None if own is None else own[read])

    def before(self, x: Tensor) -> Tensor:
        """Project rows x (T, hidden) for the mixer, for example to queries, keys and values."""
        return self.mixer.project(self.input_layernorm(x))

    def after(self, mixed: Tensor, x: Tensor, own: Tensor | None = None) -> Tensor:
        """Apply everything after the mixer to `mixed`, the mixer's output for rows x.

        own: (T, width), the layer's own embeddings of the rows; None: there are none.
        """
        add_norm = partial(self.kernels.add_norm, eps=self.eps, centered=self.centered)
        if self.post_feedforward_layernorm is None:
            if self.kernels.joins_rows:
                weight = self.post_attention_layernorm.weight
                x, inner = add_norm(x, self.mixer.output(mixed, None), None, weight)
                return self.mlp(inner, x)  # type: ignore[no-any-return]
            x = self.mixer.output(mixed, x)
            return self.mlp(self.post_attention_layernorm(x), x)  # type: ignore[no-any-return]
        before = self.pre_feedforward_layernorm
        x, inner = add_norm(
            x,
            self.mixer.output(mixed, None),
            self.post_attention_layernorm.weight,
            None if before is None else before.weight,
        )
        factor, out = self.layer_scalar, self.mlp(inner, None)
        if self.per_layer is None:
            return add_norm(x, out, self.post_feedforward_layernorm.weight, None, factor=factor)[0]
        x, _ = add_norm(x, out, self.post_feedforward_layernorm.weight, None)
        return self.per_layer(x, own, factor)  # type: ignore[no-any-return]

    def stack_layer(self) -> StackLayer:
        """Return the layer's weights and products, from which kernels run a stack of layers as one call."""
        attention, block = self.self_attn, self.mlp
        parts = StackLayer(
            self.input_layernorm.weight,
            self.post_attention_layernorm.weight,
            None if attention.q_norm is None else attention.q_norm.weight,
            None if attention.k_norm is None else attention.k_norm.weight,
            attention.qkv.product,
            attention.o_proj.product,
        )
        if isinstance(block, ExpertsBlock):
            return replace(parts, router=block.gate.product, mixture=block.mixture)
        assert isinstance(block, GatedMLP)
        return replace(parts, gate_up=block.gate_up.product, down=block.down_proj.product)


class PerLayerEmbeddings(nn.Module):
    """The table of all layers' embeddings, and the map from input embeddings to as many numbers.

    A table holds one embedding per token and layer. A normalised linear map of the row's input embedding
    is added to it.
    """

    def __init__(self, hidden: int, layers: int, config: PerLayer, eps: float) -> None:
        super().__init__()
        self.config, self.layers = config, layers
        self.table = Embedding(config.vocab_size, layers * config.width)
        self.projection = Linear(hidden, layers * config.width, bias=False)
        self.norm = RMSNorm(config.width, eps)

    def forward(self, ids: Tensor, x: Tensor, visual_rows: Tensor | None) -> Tensor:
        """Return the embeddings of rows, (T, layers, width).

        ids: (T,), token ids.
        x: (T, hidden), the decoder's input embeddings of these rows.
        visual_rows: numbers of the rows of visual tokens; None: there are none.
        """
        if visual_rows is not None:
            ids = ids.index_fill(0, visual_rows, self.config.padding)
        shape = (len(ids), self.layers, self.config.width)
        of_tokens: Tensor = self.table(ids).view(shape)
        # As for the input embeddings, the factor is rounded to the model's type and stays on the host.
        of_tokens = of_tokens * torch.tensor(self.config.width**0.5, dtype=x.dtype)
        of_rows = self.norm((self.projection(x) * x.shape[1] ** -0.5).view(shape))
        return (of_rows + of_tokens) * 0.5**0.5  # type: ignore[no-any-return]


class PerLayerInput(nn.Module):
    """Adds a layer's own embeddings: (x + norm(projection(act(gate(x)) * embedding))) * factor."""

    kernels: Kernels = PLAIN

    def __init__(self, hidden: int, config: PerLayer, eps: float) -> None:
        super().__init__()
        self.gate = Linear(hidden, config.width, bias=False, activation=config.activation)
        self.projection = Linear(config.width, hidden, bias=False)
        self.norm = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, embeddings: Tensor, factor: Tensor | None) -> Tensor:
        """x: (T, hidden). embeddings: (T, width), the layer's own. factor: (1,); None: 1."""
        own = self.projection(self.gate(x) * embeddings)
        return self.kernels.add_norm(x, own, self.norm.weight, None, self.norm.eps, factor=factor)[0]


class CrossAttentionMixer(nn.Module):
    """The attention of a cross layer. Attribute names are those of checkpoints."""

    kernels: Kernels = PLAIN

    def __init__(self, config: DecoderConfig, shape: CrossAttention) -> None:
        super().__init__()
        self.shape = shape
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = Linear(config.hidden, query, bias=False)
        self.k_proj = Linear(config.hidden, key, bias=False)
        self.v_proj = Linear(config.hidden, key, bias=False)
        self.o_proj = Linear(query, config.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, config.eps)
        self.k_norm = RMSNorm(shape.head_dim, config.eps)

    def keys_values(self, states: Tensor) -> Tensor:
        """Return keys and values (R, 2 * kv_heads * head_dim) of image states (R, hidden)."""
        heads = len(states), self.shape.kv_heads, self.shape.head_dim
        keys = self.k_norm(self.k_proj(states).view(heads))
        return torch.stack((keys, self.v_proj(states).view(heads)), dim=1).flatten(1)

    def forward(self, x: Tensor, runs: tuple[ImageRows, ...], place: int) -> Tensor:
        """Attend from rows x (n, hidden), those of all runs one after the other. Returns (n, hidden).

        place: number of the layer among those with cross-attention.
        """
        query = self.q_norm(self.q_proj(x).view(len(x), self.shape.heads, self.shape.head_dim))
        parts, first = [], 0
        heads = slice(*(self.shape.read or (None, None)))
        for run in runs:
            part, kv = query[first : first + len(run.rows)], run.keys_values[place][None, :, :, heads]
            parts.append(self.kernels.attend(part, kv, run.plan, self.shape.scale))
            first += len(run.rows)
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(mixed.flatten(1))  # type: ignore[no-any-return]


class CrossLayer(nn.Module):
    """A layer with cross-attention. Learned gates scale the outputs of attention and MLP by their tanh.

    The states lie outside of the prompt. Their keys and values do not depend on the text, so they are
    computed once, with the image. Rows that see no image pass such a layer unchanged.

    place: number of the layer among those with cross-attention.
    """

    kernels: Kernels = PLAIN

    def __init__(self, config: DecoderConfig, mixer: CrossAttention, block: Dense, place: int) -> None:
        super().__init__()
        self.place = place
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.cross_attn = CrossAttentionMixer(config, mixer)
        self.cross_attn_attn_gate = parameter(1)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = GatedMLP(config.hidden, block.intermediate, block.activation, bias=block.bias)
        self.cross_attn_mlp_gate = parameter(1)

    def forward(self, x: Tensor, step: Step, read: Tensor | None = None) -> Tensor:
        """Compute the layer on rows x (T, hidden). read: as in `Layer.forward`."""
        if step.images:
            if sum(len(run.rows) for run in step.images) == len(x):
                x = self._see(x, step.images)  # runs are in order, so these are the rows of x
            else:
                rows = torch.cat([run.rows for run in step.images])
                x = x.index_copy(0, rows, self._see(x[rows], step.images))
        return x if read is None else x[read]

    def _see(self, x: Tensor, images: tuple[ImageRows, ...]) -> Tensor:
        """Compute the layer on rows x (n, hidden) that see images."""
        norm, add = self.post_attention_layernorm, self.kernels.add_norm
        mixed = self.cross_attn(self.input_layernorm(x), images, self.place)
        x, inner = add(x, mixed, None, norm.weight, norm.eps, gate=self.cross_attn_attn_gate)
        return add(x, self.mlp(inner, None), None, None, norm.eps, gate=self.cross_attn_mlp_gate)[0]


def _feed_forward(config: DecoderConfig, block: FeedForward) -> nn.Module:
    if isinstance(block, Dense):
        return GatedMLP(config.hidden, block.intermediate, block.activation, bias=block.bias)
    if block.dense:
        return DenseBesideExperts(config.hidden, block, config.eps)
    return ExpertsBlock(config.hidden, block)


def _norm(config: DecoderConfig) -> RMSNorm:
    return RMSNorm(config.hidden, config.eps, centered=config.centered_norms)
