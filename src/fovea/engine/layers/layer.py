"""One decoder layer: a mixer and a feed-forward block, each after a norm."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fovea.engine.layers.config import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    GatedDelta,
    LayerConfig,
    ShortConv,
)
from fovea.engine.layers.experts import DenseBesideExperts, ExpertsBlock
from fovea.engine.layers.mixers import AttentionMixer, ConvMixer, DeltaMixer, Mixer
from fovea.engine.layers.mlp import GatedMLP
from fovea.engine.layers.norm import RMSNorm
from fovea.engine.layers.per_layer import PerLayerInput
from fovea.engine.layers.shape import DecoderConfig
from fovea.engine.layers.step import Step
from fovea.kernels.base import StackLayer


class Layer(nn.Module):
    """One decoder layer. The attribute of its mixer is named as in checkpoints."""

    rowwise = ("before", "after")

    def __init__(self, config: DecoderConfig, shape: LayerConfig, number: int) -> None:
        super().__init__()
        self.number = number
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
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False) if shape.scaled else None

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
        if self.post_feedforward_layernorm is None:
            x = self.mixer.output(mixed, x)
            return self.mlp(self.post_attention_layernorm(x), x)  # type: ignore[no-any-return]
        x = x + self.post_attention_layernorm(self.mixer.output(mixed, None))
        inner = x if self.pre_feedforward_layernorm is None else self.pre_feedforward_layernorm(x)
        x = x + self.post_feedforward_layernorm(self.mlp(inner, None))
        if self.per_layer is not None:
            x = self.per_layer(x, own)
        return x if self.layer_scalar is None else x * self.layer_scalar

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


def _feed_forward(config: DecoderConfig, block: FeedForward) -> nn.Module:
    if isinstance(block, Dense):
        return GatedMLP(config.hidden, block.intermediate, block.activation, bias=block.bias)
    if block.dense:
        return DenseBesideExperts(config.hidden, block, config.eps)
    return ExpertsBlock(config.hidden, block)


def _norm(config: DecoderConfig) -> RMSNorm:
    return RMSNorm(config.hidden, config.eps, centered=config.centered_norms)
