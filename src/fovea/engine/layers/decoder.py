"""One decoder for the Llama, Qwen2 and Qwen3 family, over a paged KV cache.

Rows, not batches: a step is a flat list of T tokens of any sequences, and only attention knows which row belongs to
whom. Visual tokens are rows whose embedding came from the vision tower.
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
from fovea.kernels.quantize import Format
from fovea.kernels.torch.kernels import PLAIN, Stack, StackLayer, StackShape, TorchKernels


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder, in the units of the checkpoints' own configurations."""

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

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.heads, self.kv_heads, self.head_dim)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one step shares. cos, sin (T, 1, head_dim) float32."""

    cos: Tensor
    sin: Tensor
    attention: AttentionPlan


class Attention(nn.Module):
    kernels: TorchKernels = PLAIN

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv = FusedLinear(config.hidden, parts, bias=config.qkv_bias)
        self.o_proj = Linear(query, config.hidden, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.eps) if config.qk_norm else None
        self.eps = config.eps

    def mix(self, qkv: Tensor, kv: Tensor, step: Step) -> Tensor:
        """Rows of queries, keys and values to rows of attended values, (T, heads * head_dim)."""
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
        return self.kernels.attend(query, kv, step.attention, self.scale).reshape(rows, -1)


class Layer(nn.Module):
    rowwise = ("before", "after")

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = GatedMLP(config.hidden, config.intermediate, config.activation, bias=config.mlp_bias)

    def forward(self, x: Tensor, kv: Tensor, step: Step) -> Tensor:
        return self.after(self.self_attn.mix(self.before(x), kv, step), x)

    def before(self, x: Tensor) -> Tensor:
        """Queries, keys and values of rows (T, hidden), not rotated yet."""
        return self.self_attn.qkv(self.input_layernorm(x))  # type: ignore[no-any-return]

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        """mixed: what the rows x attended to."""
        x = self.self_attn.o_proj(mixed, x)
        return self.mlp(self.post_attention_layernorm(x), x)  # type: ignore[no-any-return]

    def parts(self) -> StackLayer:
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
    ) -> Tensor:
        """Hidden states before the final norm.

        x (T, hidden) input embeddings, positions (T,) or (3, T), kv (layers, blocks, block_size, 2, kv_heads, head_dim).
        deepstack[i] (len(visual_rows), hidden) is added to the visual rows after layer i (DeepStack, arXiv 2406.04334).
        """
        cos, sin = self.rotary(positions, x.dtype)
        step = Step(cos, sin, plan)
        first = 0
        if visual_rows is not None:
            for index, features in enumerate(deepstack):
                x = self._run(x, index, index + 1, kv, step).index_add(0, visual_rows, features)
                first = index + 1
        return self._run(x, first, len(self.layers), kv, step)

    def _run(self, x: Tensor, first: int, last: int, kv: Tensor, step: Step) -> Tensor:
        if self._stack is not None:
            return self._stack(x, first, last, step.cos, step.sin, kv, step.attention)
        for index in range(first, last):
            x = self.layers[index](x, kv[index], step)
        return x

    def use_stack(self, kernels: TorchKernels) -> None:
        """Let the layers run as one call, if the kernels have one for them."""
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
        self._stack = kernels.stack(shape, [layer.parts() for layer in self._typed_layers()])

    def _typed_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]


class LanguageHead(nn.Module):
    """Logits of rows. A tied head reads the embedding table, or shares a quantized one with it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.tied = config.tied
        self.lm_head = Linear(config.hidden, config.vocab_size if not config.tied else 0, bias=False)

    def tie(self, embedding: Embedding, kernels: TorchKernels, format: Format | None, *, copy: bool) -> None:
        """format: of the table that both read, or None: plain. copy: repack a plain one for the head all the same, which
        costs memory, since the table is still read by row."""
        self.lm_head.weight = embedding.weight
        self.lm_head.out_features = embedding.weight.shape[0]
        if format is not None:
            self.lm_head.format = format
            table = kernels.quantized(embedding.weight.data, None, None, False, format)
            self.lm_head.product = table
            embedding.share(table)
        elif copy:
            self.lm_head.pack(kernels, keep=True)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, hidden) to float32 logits (rows, vocabulary)."""
        return self.lm_head(x).float()  # type: ignore[no-any-return]
