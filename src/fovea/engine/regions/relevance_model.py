"""What question and image make of each other, for whoever then chooses: the model's part of relevance.

Beside it, what was seen where of the images that were answered about last, for whoever asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.vision.processor.base import Reduction
from fovea.relevance import coupling
from fovea.relevance.balancing import Balancer, Tensions
from fovea.relevance.pipeline import Chooser, Realization, Survey, realize
from fovea.relevance.realizing import Shape
from fovea.relevance.texture import Map

Array = NDArray[np.floating[Any]]
Words = Callable[[Sequence[int]], Tensor]
"""The decoder's embeddings (Q, D) of ids (Q,)."""
MAX_REALIZATIONS = 256
"""Images of which it is known what was seen where, the latest."""


class RelevanceModel:
    """head: weights of what was trained for this model's relevance, by name; None: nothing was."""

    def __init__(self, words: Words, head: Mapping[str, Array] | None = None) -> None:
        self._words = words
        self._head = head
        self._balancer = Balancer(head)
        self._seen: OrderedDict[str, Realization] = OrderedDict()

    def tensions(self, survey: Survey, reduction: Reduction, total: int) -> Tensions:
        """From question, picture and load, before the encoder has seen anything. total: tokens to be chosen."""
        words = self._embedded(reduction) if self._balancer.learns_tensions else None
        pooled = None if words is None else coupling.normalize(words).mean(0)
        found = self._balancer.tensions(reduction.question, pooled, survey.statistics(total))
        return found.under(reduction.load)

    def realize(
        self,
        survey: Survey,
        reduction: Reduction,
        total: int,
        tensions: Tensions,
        view: tuple[Shape, Tensor],
        choose: Chooser,
    ) -> Realization:
        """view: shape and features (tokens, D) of a view of the whole."""
        shape, embeds = view
        words = self._embedded(reduction)
        if words is None:
            participatory = survey.keyword_map(reduction.question)
        else:
            participatory = self._coupled(survey, reduction, shape, embeds.float().cpu().numpy(), words)
        found = realize(
            survey, participatory, total, tensions=tensions, balancer=self._balancer, choose=choose
        )
        self._remember(reduction.key, found)
        return found

    def recent_realization(self, key: str) -> Realization | None:
        """What was seen where of the image with that key, if that was lately. Thread-safe."""
        return self._seen.get(key)

    def reuse_realization(self, key: str) -> Realization | None:
        """The same for who is going to show it once more: it is of late again."""
        found = self._seen.get(key)
        if found is not None:
            self._remember(key, found)
        return found

    def _embedded(self, reduction: Reduction) -> Array | None:
        if not reduction.word_ids:
            return None
        rows: Array = self._words(reduction.word_ids).float().cpu().numpy()
        return rows

    def _coupled(
        self, survey: Survey, reduction: Reduction, shape: Shape, features: Array, words: Array
    ) -> Map:
        if self._head is None:
            return coupling.couple_without_head(
                features, words, shape, survey.keyword_map(reduction.question)
            )
        return coupling.resample(coupling.couple(self._head, features, words), shape, survey.grid)

    def _remember(self, key: str, found: Realization) -> None:
        self._seen[key] = found
        self._seen.move_to_end(key)
        while len(self._seen) > MAX_REALIZATIONS:
            self._seen.popitem(last=False)
