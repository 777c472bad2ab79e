"""The interface of a layer that expects tokens from the states of another decoder, its target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fovea.engine.layers.config import DecoderConfig
from fovea.engine.layers.linear import Linear, use_kernels
from fovea.engine.layers.mixers import RotaryAngles
from fovea.engine.layers.step import Step

if TYPE_CHECKING:
    from fovea.engine.models.base import VisionLanguageModel


class DraftLayer(nn.Module, ABC):
    """One decoder layer with memory of its own, and a head.

    taps: numbers of the target's layers whose inputs it reads, ascending; the number of layers means the
        states after the last one.
    config: the shape of a decoder with this layer alone.
    """

    def __init__(self, target: VisionLanguageModel, config: DecoderConfig, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.taps = taps
        self.config = config
        self.rotary = RotaryAngles(config.rotaries[0])
        # The target's parts are shared, and not among this module's own parameters.
        self.__dict__["target"] = target

    target: VisionLanguageModel

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's states at the taps, (T, len(taps) * target's width), to the layer's width."""

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of token ids (T,)."""

    @abstractmethod
    def forward(self, embeds: Tensor, states: Tensor, step: Step) -> Tensor:
        """Compute rows. Returns what the next row reads in place of the target's states, (T, hidden).

        embeds: embedding of the token after each row's own. states: (T, hidden).
        """

    @abstractmethod
    def expect(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely token after each of these outputs, and its probability: (T,) each."""

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], ...]:
        """Cosines and sines of rows. positions: the target's, (T,) or (3, T)."""
        if positions.ndim == 2 and self.config.rotaries[0].axes is None:
            positions = positions[0]
        return (self.rotary(positions, dtype),)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights and rows, which is the target's."""
        return self.target.dtype

    def finish_loading(self) -> None:
        """Set the kernels of the target, and pack the weights for them."""
        kernels = self.target.kernels
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(kernels)
        use_kernels(self, kernels)


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely token of each row of logits (rows, vocabulary), and its probability: (rows,)."""
    best, tokens = logits.max(-1)
    return tokens, (best - logits.logsumexp(-1)).exp()
