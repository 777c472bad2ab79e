"""The parts of decoders: each layer has a mixer, a feed-forward block and norms.

A mixer is the part of a layer in which tokens of one sequence exchange information. `Attention` reads keys
and values of earlier tokens, all of them or those in a window. `GatedDelta` and `ShortConv` read a state of
fixed size instead. The values are those of the checkpoint's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions, which one or more layers share.

    inverse: inverse frequencies, one for each pair of rotated numbers. The first 2 * len(inverse) numbers of
        a head are rotated, the others are not (partial rotary embedding).
    scaling: factor of the cosines and sines.
    axes: coordinate (0 time, 1 height, 2 width) of each frequency (M-RoPE); None: positions have one
        dimension.
    """

    inverse: tuple[float, ...]
    scaling: float = 1.0
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention with grouped heads.

    heads, kv_heads, head_dim: query heads, KV heads, numbers per head.
    scale: factor of the scores.
    qkv_bias, out_bias: whether the input and output projections have biases.
    qk_norm: queries and keys of each head are normalised before the rotation.
    gated: the output is multiplied by the sigmoid of a gate, which the input projection computes, too.
    rotary: number of its rotary positions in `DecoderConfig.rotaries`.
    window: a token sees this many tokens, itself included; None: all tokens before it.
    causal: the tokens of an image do not see each other, even if the decoder has `whole_images`.
    value_norm: values are normalised, without a weight.
    shared_values: values are the keys before their norm and rotation; there is no projection of values.
    source: number of an earlier layer whose keys and values this layer reads; None: it has its own.
    pairs: the checkpoint rotates the neighbouring numbers 2i and 2i + 1 of a head, instead of i and i + R/2
        of R rotated numbers. Its queries and keys are reordered when they are loaded. R must divide
        `head_dim`, and the layer must have no norms of queries and keys, no gates and no shared values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    rotary: int = 0
    window: int | None = None
    causal: bool = False
    value_norm: bool = False
    shared_values: bool = False
    source: int | None = None
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated DeltaNet (arXiv 2412.06464): linear attention whose state is a matrix per head.

    key_heads, key_dim: heads of queries and keys, and numbers per head.
    value_heads, value_dim: heads of values, a multiple of `key_heads`, and numbers per head.
    kernel: width of the convolution over queries, keys and values, in tokens.
    activation: applied after the convolution.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int
    activation: str

    @property
    def channels(self) -> int:
        """Channels of the convolution: the widths of queries, keys and values of all heads, added up."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A short convolution between two gates (LFM2).

    kernel: width of the convolution in tokens.
    bias: whether the convolution and both projections have biases.
    """

    kernel: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Attention of text to the states of images, which lie outside of the prompt (Llama 3.2 Vision).

    heads, kv_heads, head_dim, scale: see `Attention`. Queries and keys are normalised and not rotated.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated feed-forward block.

    intermediate: width of the gate.
    activation: applied to the gate.
    bias: whether its linear maps have biases.
    """

    intermediate: int
    activation: str
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of gated feed-forward blocks: a router chooses some of them for each token.

    count: number of experts.
    active: experts per token. Their weights are probabilities over all experts.
    intermediate: width of an expert.
    activation: applied to the gate.
    shared: width of an expert that every token uses; 0: there is none.
    shared_gate: the shared expert's output is scaled by a gate of its own.
    dense: width of a dense block beside the experts. Then both have norms of their own, and the router reads
        the rows before all norms (Gemma 4). 0: there is none.
    normalized: the weights of a token's experts are scaled to a sum of 1.
    scaling: factor of the weights of a token's experts; only without `normalized`.
    """

    count: int
    active: int
    intermediate: int
    activation: str
    shared: int = 0
    shared_gate: bool = True
    dense: int = 0
    normalized: bool = True
    scaling: float = 1.0


Mixer = Attention | GatedDelta | ShortConv | CrossAttention
FeedForward = Dense | Experts


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The parts of one layer.

    sandwich: the outputs of mixer and feed-forward block are normalised before they are added (Gemma,
        GLM-4.1V).
    scaled: the layer's output is multiplied by a number from the checkpoint. Only layers with `sandwich`
        can have this, and per-layer embeddings.
    """

    mixer: Mixer
    feed_forward: FeedForward
    sandwich: bool = False
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class PerLayer:
    """Per-layer embeddings (Gemma 4): each layer adds a small embedding of its own for each token.

    width: numbers of an embedding.
    vocab_size: rows of the table.
    padding: token id whose row the tokens of images get.
    activation: applied to the gate.
    """

    width: int
    vocab_size: int
    padding: int
    activation: str
