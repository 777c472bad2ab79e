"""Runs a model's encoder with the method `relevance`, without the engine's scheduler and loop.

It has the engine's own objects: the prompt builder, which writes the prompts of a look, and the encoder,
which looks and decides. So a benchmark reads the decision itself, with the place of every token.
"""

from __future__ import annotations

from typing import Any

import torch

from fovea.core.media import PixelBudget, VisualTokens
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.assemble import prompt_builder
from fovea.engine.cache.embeddings import EmbeddingCache, RegionCache
from fovea.engine.load import LoadedModel
from fovea.engine.regions.encoder import VisualEncoder
from fovea.engine.request.inputs import to_image
from fovea.engine.request.prompt_plan import process
from fovea.engine.vision.encoding import one_by_one
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.evaluation.sweep import RELEVANCE
from fovea.relevance.pipeline import Realization

CACHE_BYTES = 256 << 20
"""Size of the cache of whole outputs, and of the cache of views."""


class RelevanceEncoder:
    """The encoder of a loaded model.

    budget: the component that plans visual tokens and has the prompts of a look written.
    """

    def __init__(self, loaded: LoadedModel, *, caches: bool) -> None:
        """caches: whether encoded images and views are kept for the next question."""
        size = CACHE_BYTES if caches else 0
        self._processor = loaded.processor
        self._builder = prompt_builder(loaded)
        self.budget = self._builder._visual_budget
        self._encoder = VisualEncoder(
            loaded.model, loaded.processor, EmbeddingCache(size), RegionCache(size), heads=loaded.look_heads
        )

    def prepare(self, image: Any, question: str, keep: float) -> ProcessedImage:
        """The pixels and the plan of an image whose share `keep` of tokens is kept for a question.

        image: a PIL image or a path.
        """
        budget = PixelBudget(visual=VisualTokens(RELEVANCE, keep))
        parts = ImagePart(to_image(image), budget), TextPart(question)
        [planned] = self._builder.outline(ChatPrompt((Message("user", parts),))).images
        return process(planned, self._processor)

    @torch.inference_mode()
    def realize(self, image: ProcessedImage) -> Realization:
        """Encode a prepared image until it is decided which views it has, and return the decision."""
        assert image.plan.reduction is not None
        key, decisions = image.plan.reduction.key, self._encoder.relevance
        for _ in one_by_one(self._encoder.slices(image, lambda: iter(()))):
            if decisions.recent_realization(key) is not None:
                break
        realization = decisions.recent_realization(key)
        assert realization is not None
        return realization
