"""The memory of a decoder's layers: keys and values in blocks, and states in slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.engine.layers.shape import DecoderConfig

States = tuple[Tensor, ...]
"""The state tensors of one layer, (slots, ...) each."""


@dataclass(frozen=True, slots=True)
class DecoderMemory:
    """Keys, values and states of all sequences.

    kv: for each KV group of the decoder (layers, blocks, block_size, 2, kv_heads, head_dim).
    states: for each layer with a state its tensors, shaped as `DecoderConfig.state_shapes` says.
    places: the place of each layer's memory, see `DecoderConfig.places`.
    """

    kv: tuple[Tensor, ...]
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
        *,
        pinned: bool = False,
    ) -> DecoderMemory:
        """Allocate memory that is zero.

        blocks: number of blocks of each KV group. slots: number of state slots.
        pinned: in memory from which a GPU can copy directly.
        """
        # Zeroed, not empty: rows past a sequence's end are masked, but 0 * NaN would still be NaN.
        kv = tuple(
            torch.zeros(
                (len(group.layers), count, block_size, 2, group.heads.kv, group.heads.dim),
                dtype=dtype,
                device=device,
                pin_memory=pinned,
            )
            for group, count in zip(config.kv_groups, blocks, strict=True)
        )
        states = tuple(
            tuple(
                torch.zeros((slots, *shape), dtype=torch.float32 if exact else dtype, device=device)
                for shape, exact in layer
            )
            for layer in config.state_shapes()
        )
        return cls(kv, states, config.places)

    def layer_kv(self, layer: int) -> Tensor:
        """Keys and values of an attention layer, (blocks, block_size, 2, kv_heads, head_dim)."""
        place = self.places[layer]
        assert isinstance(place, tuple)
        return self.kv[place[0]][place[1]]

    def layer_states(self, layer: int) -> States:
        place = self.places[layer]
        assert isinstance(place, int)
        return self.states[place]

    @property
    def state_nbytes(self) -> int:
        """Bytes of all states of one slot."""
        return sum(tensor[0].nbytes for layer in self.states for tensor in layer)
