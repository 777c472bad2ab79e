"""What the encoder hands to the decoder for one image."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class VisualFeatures:
    """embeds (tokens, hidden) take the places of the image's tokens; deepstack holds more of them for the first layers.

    Decoder layer i adds deepstack[i] (tokens, hidden) to the same places. made: when they were encoded, in seconds of
    `time.time`; whichever tier they come from, their age counts from then.
    """

    embeds: Tensor
    deepstack: tuple[Tensor, ...] = ()
    made: float = field(default_factory=time.time, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.embeds, *self.deepstack
