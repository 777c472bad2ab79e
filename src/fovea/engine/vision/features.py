"""What the encoder hands to the decoder for one image."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class VisualFeatures:
    """embeds (tokens, hidden) take the places of the image's tokens; deepstack holds more of them for the first layers.

    Decoder layer i adds deepstack[i] (tokens, hidden) to the same places.
    """

    embeds: Tensor
    deepstack: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.embeds, *self.deepstack))
