"""The shape of a decoder as a list of parts, and the memory that its layers need."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import (
    Attention,
    CrossAttention,
    GatedDelta,
    LayerConfig,
    PerLayer,
    Rotary,
    ShortConv,
)
from fovea.kernels.attention import Heads


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

    def bytes_per_token(self, itemsize: int) -> int:
        return 2 * len(self.layers) * self.heads.kv * self.heads.dim * itemsize


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

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The KV groups: one without a window, which may have no layers, and at most one with a window.

        Raises UnsupportedModel if the layers need other groups.
        """
        found: dict[tuple[int | None, Heads, bool], list[int]] = {}
        for number, layer in enumerate(self.layers):
            if isinstance(mixer := layer.mixer, Attention) and mixer.source is None:
                heads = Heads(mixer.heads, mixer.kv_heads, mixer.head_dim)
                found.setdefault((mixer.window, heads, mixer.causal), []).append(number)
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
        of another has the other's place.
        """
        places: dict[int, tuple[int, int] | int] = {}
        for group_number, group in enumerate(self.kv_groups):
            places |= {layer: (group_number, number) for number, layer in enumerate(group.layers)}
        states, cross = count(), count()
        for number, layer in enumerate(self.layers):
            if isinstance(layer.mixer, CrossAttention):
                places[number] = next(cross)
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

    def state_shapes(self) -> tuple[tuple[tuple[tuple[int, ...], bool], ...], ...]:
        """Shapes of the states of one sequence: for each layer with a state, (shape, exact) of its tensors.

        The inputs that the convolution still reads come first, (kernel - 1, channels); they have the model's
        type. A matrix per head, (value_heads, key_dim, value_dim), follows for Gated DeltaNet. exact: the
        tensor is float32, whatever the model's type is.
        """
        shapes: list[tuple[tuple[tuple[int, ...], bool], ...]] = []
        for layer in self.layers:
            mixer = layer.mixer
            if isinstance(mixer, ShortConv):
                shapes.append((((mixer.kernel - 1, self.hidden), False),))
            elif isinstance(mixer, GatedDelta):
                matrix = (mixer.value_heads, mixer.key_dim, mixer.value_dim)
                shapes.append((((mixer.kernel - 1, mixer.channels), False), (matrix, True)))
        return tuple(shapes)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token, all layers together."""
        return sum(group.bytes_per_token(itemsize) for group in self.kv_groups)

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
