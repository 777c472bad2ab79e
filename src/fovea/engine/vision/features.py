"""What the encoder hands to the decoder for one image."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VisualFeatures:
    """embeds (tokens, hidden) take the places of the image's tokens; deepstack holds more of them for the first layers.

    Decoder layer i adds deepstack[i] (tokens, hidden) to the same places. made: when they were encoded, in seconds of
    `time.time`; whichever tier they come from, their age counts from then.
    places (tokens, 2) int32: row and column of each token in the grid of the whole image, or (tokens, 1), its number among
    the whole's tokens, where positions have no rows; None: they are all there, in order.
    """

    embeds: Tensor
    deepstack: tuple[Tensor, ...] = ()
    made: float = field(default_factory=time.time, compare=False)
    places: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.embeds, *self.deepstack, *(() if self.places is None else (self.places,))

    @classmethod
    def of(cls, tensors: Sequence[Tensor], made: float) -> VisualFeatures:
        """What `tensors` gave, again."""
        last = tensors[-1]
        places = last if len(tensors) > 1 and last.dtype is torch.int32 else None
        deepstack = tensors[1:] if places is None else tensors[1:-1]
        return cls(tensors[0], tuple(deepstack), made, places)
