"""One decoder for the Llama, Qwen2 and Qwen3 families, over a paged KV cache.

A step computes a flat list of T rows: one per token, of any sequences. Only attention needs to know to which
sequence a row belongs. Visual tokens are rows whose input embedding comes from the vision tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fovea.engine.layers.linear import Embedding, FusedLinear, Linear
from fovea.engine.layers.mlp import GatedMLP
from fovea.engine.layers.norm import RMSNorm
from fovea.engine.layers.rope import Rotary
from fovea.kernels.attention import AttentionPlan, Heads
from fovea.kernels.base import Kernels, Stack, StackLayer, StackShape
from fovea.kernels.quantize import Format
from fovea.kernels.torch.kernels import PLAIN


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder; the values are those of the checkpoint's configuration.

    qk_norm: queries and keys of each head are normalised before the rotation (Qwen3).
    tied: the embedding table is the language head as well.
    rope_inverse: inverse frequencies of the rotary positions, head_dim / 2 of them.
    rope_scaling: factor of their cosines and sines.
    mrope_axes: coordinate (0 time, 1 height, 2 width) of each frequency (M-RoPE); None: positions have one
        dimension.
    query_scaling: (beta, period) of the scale 1 + beta * log(1 + floor(position / period)) of queries
        (Ministral 3); None: queries are not scaled.
    """

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    activation: str
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    max_positions: int
    rope_inverse: tuple[float, ...]
    rope_scaling: float
    mrope_axes: tuple[int, ...] | None
    query_scaling: tuple[float, int] | None = None

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.heads, self.kv_heads, self.head_dim)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class Step:
    """Input that all layers of one step share.

    cos, sin: (T, 1, head_dim) float32, of the rotary positions.
    attention: which rows attend to which blocks of KV.
    query_scale: (T, 1, 1), scale of each row's queries; None: 1 for all rows.
    """

    cos: Tensor
    sin: Tensor
    attention: AttentionPlan
    query_scale: Tensor | None = None


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache, with its projections."""

    kernels: Kernels = PLAIN

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        outputs = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv = FusedLinear(config.hidden, outputs, bias=config.qkv_bias)
        self.o_proj = Linear(query, config.hidden, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.eps) if config.qk_norm else None
        self.eps = config.eps

    def mix(self, qkv: Tensor, kv: Tensor, step: Step) -> Tensor:
        """Store the keys and values of T rows in the KV cache and compute attention.

        qkv: (T, (heads + 2 * kv_heads) * head_dim), not rotated.
        kv: KV cache of this layer, (blocks, block_size, 2, kv_heads, head_dim).

        Returns (T, heads * head_dim), before the output projection.
        """
        rows = qkv.shape[0]
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight
        query = self.kernels.rotate_store(
            qkv.view(rows, self.heads + 2 * self.kv_heads, self.dim),
            self.heads,
            step.cos,
            step.sin,
            norms,
            self.eps,
            kv,
            step.attention.slots,
        )
        if step.query_scale is not None:
            query = query * step.query_scale
        return self.kernels.attend(query, kv, step.attention, self.scale).reshape(rows, -1)


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each after a norm."""

    rowwise = ("before", "after")

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = GatedMLP(config.hidden, config.intermediate, config.activation, bias=config.mlp_bias)

    def forward(self, x: Tensor, kv: Tensor, step: Step, read: Tensor | None = None) -> Tensor:
        """Compute the layer on rows x (T, hidden).

        read: numbers of the rows whose results are returned; None: all. All rows get keys and values.
        """
        mixed = self.self_attn.mix(self.before(x), kv, step)
        if read is None:
            return self.after(mixed, x)
        return self.after(mixed[read], x[read]) if len(read) else x[:0]

    def before(self, x: Tensor) -> Tensor:
        """Queries, keys and values of rows x (T, hidden), not rotated."""
        return self.self_attn.qkv(self.input_layernorm(x))  # type: ignore[no-any-return]

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Apply output projection, norm and MLP to attention output `mixed` of rows x (T, hidden)."""
        x = self.self_attn.o_proj(mixed, x)
        return self.mlp(self.post_attention_layernorm(x), x)  # type: ignore[no-any-return]

    def stack_layer(self) -> StackLayer:
        """Return the layer's weights and products, from which kernels run a stack of layers as one call."""
        attention, mlp = self.self_attn, self.mlp
        return StackLayer(
            self.input_layernorm.weight,
            self.post_attention_layernorm.weight,
            None if attention.q_norm is None else attention.q_norm.weight,
            None if attention.k_norm is None else attention.k_norm.weight,
            attention.qkv.product,
            attention.o_proj.product,
            mlp.gate_up.product,
            mlp.down_proj.product,
        )


class Decoder(nn.Module):
    """The decoder's embedding table, layers, final norm and rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.rotary = Rotary(
            torch.tensor(config.rope_inverse, dtype=torch.float32), config.rope_scaling, config.mrope_axes
        )
        self._stack: Stack | None = None

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        kv: Tensor,
        plan: AttentionPlan,
        visual_rows: Tensor | None = None,
        deepstack: Sequence[Tensor] = (),
        read: Tensor | None = None,
    ) -> Tensor:
        """Run all layers. Returns hidden states (rows, hidden) before the final norm.

        x: (T, hidden), input embeddings.
        positions: (T,) or (3, T).
        kv: (layers, blocks, block_size, 2, kv_heads, head_dim).
        visual_rows: numbers of the rows to which DeepStack features are added; None: there are none.
        deepstack: deepstack[i], (len(visual_rows), hidden), is added to these rows after layer i (DeepStack,
            arXiv 2406.04334).
        read: numbers of the rows that are returned; None: all T. The last layer computes little more than
            these: of a prompt only the last row is read.
        """
        cos, sin = self.rotary(positions, x.dtype)
        step = Step(cos, sin, plan, self._query_scale(positions, x.dtype))
        first = 0
        if visual_rows is not None:
            for index, features in enumerate(deepstack):
                x = self._run(x, index, index + 1, kv, step).index_add(0, visual_rows, features)
                first = index + 1
        if first == len(self.layers):
            return x if read is None else x[read]
        return self._run(x, first, len(self.layers), kv, step, read)

    def _query_scale(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The scale of each row's queries, (T, 1, 1); None: it is 1 for all rows."""
        if self.config.query_scaling is None:
            return None
        beta, period = self.config.query_scaling
        # Layers in one call cannot scale queries. They run on CPUs only, where a look at values is fast.
        if self._stack is not None and not bool((positions >= period).any()):
            return None
        scale = 1 + beta * torch.log(1 + torch.floor(positions / period))
        return scale.to(dtype)[:, None, None]

    def _run(
        self, x: Tensor, first: int, last: int, kv: Tensor, step: Step, read: Tensor | None = None
    ) -> Tensor:
        if self._stack is not None and step.query_scale is None:
            return self._stack(x, first, last, step.cos, step.sin, kv, step.attention, read)
        for index in range(first, last):
            x = self.layers[index](x, kv[index], step, read if index == last - 1 else None)
        return x

    def use_stack(self, kernels: Kernels) -> None:
        """Run the layers as one call from now on, if the kernels have such a call for this shape."""
        config = self.config
        shape = StackShape(
            config.hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.intermediate,
            config.eps,
            config.head_dim**-0.5,
        )
        self._stack = kernels.stack(shape, [layer.stack_layer() for layer in self._typed_layers()])

    def _typed_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]


class LanguageHead(nn.Module):
    """The language head: hidden states to logits. A tied head shares its weight with the embedding table."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.tied = config.tied
        self.lm_head = Linear(config.hidden, config.vocab_size if not config.tied else 0, bias=False)

    def tie(self, embedding: Embedding, kernels: Kernels, format: Format | None, *, copy: bool) -> None:
        """Share the weight of the embedding table.

        format: format to which the shared table is quantized; None: it stays plain.
        copy: pack a copy of a plain table for the head. This costs memory, since the plain table stays for
            the embedding, which reads it by row.
        """
        self.lm_head.weight = embedding.weight
        self.lm_head.out_features = embedding.weight.shape[0]
        if format is not None:
            self.lm_head.format = format
            table = kernels.quantized_product(embedding.weight.data, None, None, False, format)
            self.lm_head.product = table
            embedding.share(table)
        elif copy:
            self.lm_head.pack(kernels, keep=True)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of hidden states: (rows, hidden) to float32 (rows, vocabulary)."""
        return self.lm_head(x).float()  # type: ignore[no-any-return]
