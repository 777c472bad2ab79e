"""The prompts of the running sequences as arrays, from which the runner cuts the tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fovea.engine.job import SequenceInputs
from fovea.engine.schedule.plan import Work
from fovea.engine.sequence import ImageSpan
from fovea.engine.step.positions import place
from fovea.engine.vision.features import VisualFeatures


@dataclass(slots=True)
class PromptArrays:
    """The prompt of one sequence.

    ids: (P,) token ids.
    positions: (3, P) with M-RoPE, else (P,).
    delta: offset from the index of a token after the prompt to its position.
    visual: (P,) number of visual tokens up to and including each index; empty without images.
    inputs: pixel sources and restored features.
    positioned: starts of the spans of reduced images whose tokens have their own positions.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    delta: int
    visual: NDArray[np.int64]
    inputs: SequenceInputs
    positioned: set[int] = field(default_factory=set)

    def ids_of(self, item: Work) -> NDArray[np.int64]:
        """Token ids of a step's work, (count,)."""
        if item.stop <= len(self.ids):
            return self.ids[item.start : item.stop]
        return np.asarray(item.seq.tokens(item.start, item.stop), dtype=np.int64)

    def positions_of(self, item: Work) -> NDArray[np.int64]:
        """Positions of a step's work, (3, count) with M-RoPE, else (count,)."""
        length = len(self.ids)
        known = self.positions[..., item.start : min(item.stop, length)]
        if item.stop <= length:
            return known
        later = np.arange(max(item.start, length), item.stop) + self.delta
        if known.ndim == 2:
            later = np.broadcast_to(later, (3, len(later)))
        return np.concatenate((known, later), axis=-1)

    def place(self, span: ImageSpan, features: VisualFeatures) -> None:
        """Give the tokens of a reduced image their own positions, once its encoder output tells them."""
        if not span.full_tokens or span.start in self.positioned:
            return
        assert features.places is not None
        place(self.positions, span, features.places.cpu().numpy().astype(np.int64))
        self.positioned.add(span.start)
