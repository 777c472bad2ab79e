"""The parts of decoders, and the shape of a decoder as a list of them, with the memory that its layers need.

Each layer has a mixer, a feed-forward block and norms. A mixer is the part of a layer in which tokens of one
sequence exchange information. `Attention` reads keys and values of earlier tokens, all of them or those in a
window. `GatedDelta` and `ShortConv` read a state of fixed size instead. The values are those of the
checkpoint's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from fovea.core.errors import UnsupportedModel
from fovea.kernels.attention import Heads
from fovea.kernels.pages import KVFormat, token_bytes


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
    channels: channels of the convolution; 0: as many as the decoder is wide.
    """

    kernel: int
    bias: bool = False
    channels: int = 0


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Attention of text to the states of images, which lie outside of the prompt (Llama 3.2 Vision).

    heads, kv_heads, head_dim, scale: see `Attention`. Queries and keys are normalised and not rotated.
    read: first KV head that the queries attend to, and the one after the last; None: all. The driver of
        several processes computes all keys and values of an image, and each process attends to some.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    read: tuple[int, int] | None = None


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


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values lie in the same blocks, because they have one shape and one window.

    layers: numbers of these layers in the decoder, ascending.
    window: tokens that a token sees; None: all.
    heads: their heads.
    causal: see `Attention`.
    """

    layers: tuple[int, ...]
    window: int | None
    heads: Heads
    causal: bool = False

    def bytes_per_token(self, itemsize: int, format: KVFormat | None = None) -> int:
        """Bytes of keys and values of one token in these layers, see `kernels.pages.token_bytes`."""
        return len(self.layers) * token_bytes(self.heads.kv, self.heads.dim, itemsize, format)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder.

    hidden: width of a row between layers.
    layers: the layers, from first to last.
    rotaries: the different rotary positions of its layers.
    eps: constant of the norms.
    centered_norms: norms scale by 1 + weight, in float32, instead of by weight (Gemma, Qwen3.5).
    tied: the embedding table is the language head as well.
    max_positions: longest sequence in tokens.
    embedding_scale: factor of the embeddings of text; embeddings of images are not scaled.
    query_scaling: (beta, period) of the scale 1 + beta * log(1 + floor(position / period)) of queries
        (Ministral 3); None: queries are not scaled.
    whole_images: most tokens of an image, if the tokens of an image see each other (Gemma); 0: every token
        sees only itself and those before it.
    logit_cap: logits x become cap * tanh(x / cap); 0: they stay.
    per_layer: the per-layer embeddings; None: there are none.
    extra_embeddings: rows of the embedding table after those of the vocabulary. Prompts may hold their ids,
        and no answer does.
    stage: number of the first layer that this process computes, and of the one after the last; None: all.
        Layers have the same numbers in all processes. Only those of the stage have weights and memory.
    """

    vocab_size: int
    hidden: int
    layers: tuple[LayerConfig, ...]
    rotaries: tuple[Rotary, ...]
    eps: float
    tied: bool
    max_positions: int
    centered_norms: bool = False
    embedding_scale: float = 1.0
    query_scaling: tuple[float, int] | None = None
    whole_images: int = 0
    logit_cap: float = 0.0
    per_layer: PerLayer | None = None
    extra_embeddings: int = 0
    stage: tuple[int, int] | None = None

    @property
    def own_layers(self) -> range:
        """Numbers of the layers that this process computes."""
        return range(len(self.layers)) if self.stage is None else range(*self.stage)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The KV groups: one without a window, which may have no layers, and at most one with a window.

        Raises UnsupportedModel if the layers need other groups.
        """
        found: dict[tuple[int | None, Heads, bool], list[int]] = {}
        own = self.own_layers
        for number, layer in enumerate(self.layers):
            if isinstance(mixer := layer.mixer, Attention) and mixer.source is None:
                heads = Heads(mixer.heads, mixer.kv_heads, mixer.head_dim)
                found.setdefault((mixer.window, heads, mixer.causal), []).extend([number] * (number in own))
        groups = [KVGroup(tuple(layers), *kind) for kind, layers in found.items()]
        groups.sort(key=lambda group: group.window is not None)
        if groups[0].window is not None:
            groups.insert(0, KVGroup((), None, groups[0].heads))
        if len(groups) > 2 or (len(groups) == 2 and groups[1].window is None):
            kinds = ", ".join(f"{group.heads}, window {group.window}" for group in groups)
            raise UnsupportedModel(
                f"attention layers of these kinds: {kinds}; supported: one kind without a window, one with"
            )
        return tuple(groups)

    @property
    def places(self) -> tuple[tuple[int, int] | int, ...]:
        """The place of each layer's memory.

        It is (number of the KV group, number in the group) for attention, and for other mixers their number
        among the layers with a state, or among those with cross-attention. A layer that reads keys and values
        of another has the other's place. A layer of another stage has none, -1.
        """
        own = self.own_layers
        places: dict[int, tuple[int, int] | int] = {}
        for group_number, group in enumerate(self.kv_groups):
            places |= {layer: (group_number, number) for number, layer in enumerate(group.layers)}
        states, cross = count(), count()
        for number, layer in enumerate(self.layers):
            if isinstance(layer.mixer, CrossAttention):
                places[number] = next(cross)  # also of other stages: images have the states of all layers
            elif number not in own:
                places[number] = -1
            elif isinstance(layer.mixer, Attention) and layer.mixer.source is not None:
                places[number] = places[layer.mixer.source]
            elif number not in places:
                places[number] = next(states)
        return tuple(places[number] for number in range(len(self.layers)))

    @property
    def writing_layers(self) -> int:
        """Number of layers without the last ones that only read keys and values of earlier layers.

        These last layers write nothing that later steps read. So of a prompt they compute only the rows that
        are returned. With `whole_images` all layers count, because rows of an image see later rows.
        """
        last = len(self.layers)
        while last and not self.whole_images and _only_reads(self.layers[last - 1]):
            last -= 1
        return last

    @property
    def window(self) -> KVGroup | None:
        """The layers with a sliding window; None: there are none."""
        groups = self.kv_groups
        return groups[1] if len(groups) > 1 else None

    @property
    def attention_heads(self) -> Heads:
        """The heads of the first KV group."""
        return self.kv_groups[0].heads

    @property
    def stateful(self) -> bool:
        """Whether some layers keep a state instead of keys and values."""
        return any(isinstance(layer.mixer, (GatedDelta, ShortConv)) for layer in self.layers)

    @property
    def cross_attention(self) -> CrossAttention | None:
        """The cross-attention of these layers, which is the same in all of them; None: there is none."""
        return next((m.mixer for m in self.layers if isinstance(m.mixer, CrossAttention)), None)

    @property
    def cross_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with cross-attention."""
        return tuple(n for n, layer in enumerate(self.layers) if isinstance(layer.mixer, CrossAttention))

    @property
    def look_heads(self) -> tuple[tuple[int, int], ...]:
        """Layer and number of every query head that attends to keys of its own layer, ascending."""
        mixers = ((number, layer.mixer) for number, layer in enumerate(self.layers))
        return tuple(
            (number, head)
            for number, mixer in mixers
            if isinstance(mixer, Attention) and mixer.source is None
            for head in range(mixer.heads)
        )

    def state_shapes(self) -> tuple[tuple[tuple[tuple[int, ...], bool], ...], ...]:
        """Shapes of the states of one sequence: for each layer with a state, (shape, exact) of its tensors.

        The inputs that the convolution still reads come first, (kernel - 1, channels); they have the model's
        type. A matrix per head, (value_heads, key_dim, value_dim), follows for Gated DeltaNet. exact: the
        tensor is float32, whatever the model's type is.
        """
        shapes: list[tuple[tuple[tuple[int, ...], bool], ...]] = []
        for number in self.own_layers:
            mixer = self.layers[number].mixer
            if isinstance(mixer, ShortConv):
                shapes.append((((mixer.kernel - 1, mixer.channels or self.hidden), False),))
            elif isinstance(mixer, GatedDelta):
                matrix = (mixer.value_heads, mixer.key_dim, mixer.value_dim)
                shapes.append((((mixer.kernel - 1, mixer.channels), False), (matrix, True)))
        return tuple(shapes)

    def kv_bytes_per_token(self, itemsize: int, format: KVFormat | None = None) -> int:
        """Bytes of keys and values of one token, all layers together.

        itemsize: bytes of the model's type. format: format in 8 bits; None: they have the model's type.
        """
        return sum(group.bytes_per_token(itemsize, format) for group in self.kv_groups)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of the states of one sequence, all layers together. itemsize: bytes of the model's type."""
        total = 0
        for layer in self.state_shapes():
            for shape, exact in layer:
                numbers = 1
                for side in shape:
                    numbers *= side
                total += numbers * (4 if exact else itemsize)
        return total


def _only_reads(layer: LayerConfig) -> bool:
    return isinstance(layer.mixer, Attention) and layer.mixer.source is not None
