"""The output of a vision encoder for one image."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VisualFeatures:
    """Features of one image, which the decoder reads.

    embeds: (tokens, hidden), the input embeddings of the image's visual tokens. If the image's states lie
        outside of the prompt, their keys and values for the first layer with cross-attention,
        (`VisualPlan.states`, 2 * kv_heads * head_dim).
    deepstack: tensors (tokens, hidden). Decoder layer i adds deepstack[i] to the hidden states of the visual
        tokens. For states outside of the prompt, the keys and values for the other layers.
    created_at: time of encoding, in seconds of `time.time`. The age counts from it in every tier of the
        cache.
    places: int32, (tokens, 2): row and column of each token in the grid of the whole image. For models whose
        positions have no rows it is (tokens, 1): the number of the token among all tokens of the image.
        None: all tokens are present, in order.
    """

    embeds: Tensor
    deepstack: tuple[Tensor, ...] = ()
    created_at: float = field(default_factory=time.time, compare=False)
    places: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.embeds, *self.deepstack, *(() if self.places is None else (self.places,))

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], created_at: float) -> VisualFeatures:
        """Rebuild features from the tensors that the property `tensors` returned, in the same order."""
        last = tensors[-1]
        places = last if len(tensors) > 1 and last.dtype is torch.int32 else None
        deepstack = tensors[1:] if places is None else tensors[1:-1]
        return cls(tensors[0], tuple(deepstack), created_at, places)
