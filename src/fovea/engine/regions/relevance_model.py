"""Relevance with one model: its look at an image, the tensions, and the latest decisions."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.look_heads import Head
from fovea.engine.reduce.look import look, usual_heads
from fovea.engine.vision.encoding import Slices, VisualFeatures
from fovea.engine.vision.processor.base import LookPrompt, Reduction
from fovea.relevance.balancing import Tensions
from fovea.relevance.pipeline import Chooser, Realization, Survey, realize, tensions
from fovea.relevance.realizing import Shape
from fovea.relevance.texture import Map

log = logging.getLogger("fovea.engine")
MAX_REALIZATIONS = 256
"""Number of recent images whose realizations are remembered, to explain answers and to reuse layouts."""


class RelevanceModel:
    """Chooses the views of an image by relevance. For one thread, except `recent_realization`."""

    def __init__(self, model: VisionLanguageModel, heads: Sequence[Head] | None = None) -> None:
        """heads: those that look, chosen for this model; None: `look.usual_heads`."""
        self._model = model
        self._heads = usual_heads(model.whole) if heads is None else tuple(heads)
        self._told = False
        self._realizations: OrderedDict[str, Realization] = OrderedDict()

    def look(self, prompt: LookPrompt, view: VisualFeatures, shape: Shape) -> Slices[Map | None]:
        """How much the question attends to each token of a view of the whole image, of that shape.

        view: features of the view's tokens, as many as `shape` has.
        Returns None if the decoder's layers are in several stages, because a look reads the middle ones.
        """
        if self._model.ranks.stages > 1:
            if not self._told:
                log.warning("pipeline_parallel is more than 1: views are chosen without the question's look")
                self._told = True
            return None
        attention = yield from look(self._model, prompt, view, shape, self._heads)
        asked: Map = attention.cpu().numpy().reshape(shape)
        return asked

    def tensions(self, survey: Survey, reduction: Reduction, asked: Map | None) -> Tensions:
        """The tensions for an image. asked: what the question is about, from `look`; None: there is none."""
        return tensions(reduction.question, survey, asked).under(reduction.load)

    def realize(
        self,
        survey: Survey,
        reduction: Reduction,
        total: int,
        tensions: Tensions,
        asked: Map | None,
        choose: Chooser,
    ) -> Realization:
        """Decide which views of an image are encoded, and remember the decision under the reduction's key.

        total: tokens to be chosen.
        choose: lays out the image.
        """
        realization = realize(survey, asked, total, tensions=tensions, choose=choose)
        self._remember(reduction.key, realization)
        return realization

    def recent_realization(self, key: str) -> Realization | None:
        """The realization of the image with this key, if it is remembered. Thread-safe."""
        return self._realizations.get(key)

    def reuse_realization(self, key: str) -> Realization | None:
        """Return the realization with this key, if it is remembered, and make it the most recent one."""
        realization = self._realizations.get(key)
        if realization is not None:
            self._remember(key, realization)
        return realization

    def _remember(self, key: str, realization: Realization) -> None:
        self._realizations[key] = realization
        self._realizations.move_to_end(key)
        while len(self._realizations) > MAX_REALIZATIONS:
            self._realizations.popitem(last=False)
