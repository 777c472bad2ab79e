"""The model's part of relevance: tensions, and the coupling of question and image.

It also remembers the latest realizations, to explain answers and to reuse layouts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.vision.processor.base import Reduction
from fovea.relevance import knowing
from fovea.relevance.balancing import Balancer, Tensions
from fovea.relevance.pipeline import Chooser, Realization, Survey, realize
from fovea.relevance.realizing import Shape
from fovea.relevance.texture import Map

Array = NDArray[np.floating[Any]]
WordEmbeddings = Callable[[Sequence[int]], Tensor]
"""Maps token ids (Q,) to the decoder's input embeddings (Q, D)."""
MAX_REALIZATIONS = 256
"""Realizations of so many recent images are remembered."""


class RelevanceModel:
    """Chooses the views of an image by relevance, with one model's word embeddings and head.

    For one thread, except `recent_realization`.
    """

    def __init__(self, words: WordEmbeddings, head: Mapping[str, Array] | None = None) -> None:
        """words: gives the embeddings of the question's token ids.

        head: weights of the relevance head trained for this model, by name; None: there is none.
        """
        self._embed = words
        self._head = head
        self._balancer = Balancer(head)
        self._realizations: OrderedDict[str, Realization] = OrderedDict()

    def tensions(self, survey: Survey, reduction: Reduction, total: int) -> Tensions:
        """The tensions for an image, from question, survey and load; no encoder output is needed.

        total: tokens to be chosen.
        """
        words = self._word_embeddings(reduction) if self._balancer.learns_tensions else None
        pooled = None if words is None else knowing.normalize(words).mean(0)
        tensions = self._balancer.tensions(reduction.question, pooled, survey.statistics(total))
        return tensions.under(reduction.load)

    def realize(
        self,
        survey: Survey,
        reduction: Reduction,
        total: int,
        tensions: Tensions,
        participatory: Map,
        choose: Chooser,
    ) -> Realization:
        """Decide which views of an image are encoded, and remember the decision under the reduction's key.

        total: tokens to be chosen.
        participatory: from `couple`.
        choose: lays out the image.
        """
        realization = realize(
            survey, participatory, total, tensions=tensions, balancer=self._balancer, choose=choose
        )
        self._remember(reduction.key, realization)
        return realization

    def couple(self, survey: Survey, reduction: Reduction, shape: Shape, embeds: Tensor) -> Map:
        """The coupling of each cell to the question, (rows, columns).

        shape, embeds: a view of the whole image, and its features (tokens, D); they are used if there are
            words.
        """
        words = self._word_embeddings(reduction)
        if words is None:
            return survey.keyword_map(reduction.question)
        features = embeds.float().cpu().numpy()
        if self._head is None:
            keywords = survey.keyword_map(reduction.question)
            return knowing.couple_without_head(features, words, shape, keywords)
        return knowing.resample(knowing.couple(self._head, features, words), shape, survey.grid)

    def recent_realization(self, key: str) -> Realization | None:
        """The realization of the image with this key, if it is remembered. Thread-safe."""
        return self._realizations.get(key)

    def reuse_realization(self, key: str) -> Realization | None:
        """Return the realization with this key, if it is remembered, and make it the most recent one."""
        realization = self._realizations.get(key)
        if realization is not None:
            self._remember(key, realization)
        return realization

    def _word_embeddings(self, reduction: Reduction) -> Array | None:
        if not reduction.word_ids:
            return None
        rows: Array = self._embed(reduction.word_ids).float().cpu().numpy()
        return rows

    def _remember(self, key: str, realization: Realization) -> None:
        self._realizations[key] = realization
        self._realizations.move_to_end(key)
        while len(self._realizations) > MAX_REALIZATIONS:
            self._realizations.popitem(last=False)
