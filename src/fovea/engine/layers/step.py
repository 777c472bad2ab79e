"""The input that all layers of one step share, and their memory: KV in blocks, and states in slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fovea.engine.layers.config import DecoderConfig
from fovea.kernels.attention import AttentionPlan
from fovea.kernels.pages import KV, KVFormat, KVPool, zeros
from fovea.kernels.states import StatePlan

States = tuple[Tensor, ...]
"""The state tensors of one layer, (slots, ...) each."""


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that layers read beside their rows.

    angles: for each of the decoder's rotary positions cos and sin, (T, 1, rotated numbers) float32.
    plan: the work of the step.
    memory: keys, values and states.
    query_scale: (T, 1, 1), scale of each row's queries; None: 1 for all rows.
    per_layer: (T, layers, width), per-layer embeddings of each row; None: the decoder has none.
    images: the rows that see image states, in order; other rows see none.
    watch: is called with the number of each attention layer and its queries, (T, heads, head_dim), rotated;
        None: nobody needs them.
    taps: the states between layers that somebody needs; None: nobody needs any.
    """

    angles: tuple[tuple[Tensor, Tensor], ...]
    plan: DecoderPlan
    memory: DecoderMemory
    query_scale: Tensor | None = None
    per_layer: Tensor | None = None
    images: tuple[ImageRows, ...] = ()
    watch: Callable[[int, Tensor], None] | None = None
    taps: Taps | None = None

    def of_read_rows(self, rows: Tensor) -> Step:
        """Return the input of layers that compute only some rows.

        rows: numbers of these rows, those that `plan.read` was made for.
        """
        return replace(
            self,
            angles=tuple((cos[rows], sin[rows]) for cos, sin in self.angles),
            plan=DecoderPlan(self.plan.read),
            query_scale=None if self.query_scale is None else self.query_scale[rows],
            per_layer=None if self.per_layer is None else self.per_layer[rows],
        )


class Taps:
    """The states of all rows before some layers.

    layers: numbers of these layers, ascending; the number of layers means the states after the last one.
    taken: the states, (T, hidden) each, in this order.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.taken: list[Tensor] = []

    @property
    def joined(self) -> Tensor:
        """The states side by side, (T, len(layers) * hidden)."""
        return self.taken[0] if len(self.taken) == 1 else torch.cat(self.taken, -1)


@dataclass(frozen=True, slots=True)
class DecoderMemory:
    """Keys, values and states of all sequences.

    kv: the pages of each KV group of the decoder.
    states: for each layer with a state its tensors, shaped as `DecoderConfig.state_shapes` says.
    places: the place of each layer's memory, see `DecoderConfig.places`.
    """

    kv: tuple[KVPool, ...]
    states: tuple[States, ...]
    places: tuple[tuple[int, int] | int, ...]

    @classmethod
    def allocate(
        cls,
        config: DecoderConfig,
        blocks: tuple[int, ...],
        block_size: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_format: KVFormat | None = None,
    ) -> DecoderMemory:
        """Allocate memory that is zero.

        blocks: number of blocks of each KV group. slots: number of state slots.
        dtype: the model's type. kv_format: format of keys and values in 8 bits; None: they have that type.
        """
        kv = tuple(
            KVPool(
                (len(group.layers), count, block_size),
                group.heads.kv,
                group.heads.dim,
                dtype,
                kv_format,
                device,
            )
            for group, count in zip(config.kv_groups, blocks, strict=True)
        )
        states = tuple(
            tuple(zeros((slots, *shape), torch.float32 if exact else dtype, device) for shape, exact in layer)
            for layer in config.state_shapes()
        )
        return cls(kv, states, config.places)

    def layer_kv(self, layer: int) -> KV:
        """Keys and values of an attention layer, (blocks, block_size, 2, kv_heads, head_dim)."""
        place = self.places[layer]
        assert isinstance(place, tuple)
        return self.kv[place[0]].kv[place[1]]

    def layer_states(self, layer: int) -> States:
        place = self.places[layer]
        assert isinstance(place, int)
        return self.states[place]

    @property
    def state_nbytes(self) -> int:
        """Bytes of all states of one slot."""
        return sum(tensor[0].nbytes for layer in self.states for tensor in layer)


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """The work of one step.

    attention: for each KV group, which rows attend to which blocks.
    states: which rows read and write which states; None: no layer has a state.
    read: for each KV group, the attention of the rows that are returned, each planned like a decode. Layers
        after `DecoderConfig.writing_layers` compute only these rows. Empty: they compute all rows.
    """

    attention: tuple[AttentionPlan, ...]
    states: StatePlan | None = None
    read: tuple[AttentionPlan, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Consecutive rows of a step whose cross-attention sees the same images.

    rows: (count,), their numbers.
    plan: of their attention. The states are one block of a page table, and every row sees all of them.
    keys_values: for each layer with cross-attention (states, 2, kv_heads, head_dim), keys and values of all
        states of these images.
    """

    rows: Tensor
    plan: AttentionPlan
    keys_values: tuple[Tensor, ...]
