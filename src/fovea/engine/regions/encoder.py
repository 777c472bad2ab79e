"""What encodes an image as its plan says: all of its tokens, some of them, or some parts of it.

Where tokens are left out of the encoder's output, the whole output stays in the cache under its own name: another question,
method or ratio chooses anew and encodes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.core.stage import stage
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.cache.regions import RegionCache
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.llava_next import LlavaNext
from fovea.engine.models.qwen_vl import QwenVL
from fovea.engine.reduce.base import ReductionInput
from fovea.engine.reduce.registry import reducer
from fovea.engine.regions.any_size import PartsEncoder
from fovea.engine.regions.relevance_model import RelevanceModel
from fovea.engine.regions.tiles import PickedTiles
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.processor.base import ImageProcessor, ProcessedImage, Reduction
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.engine.vision.processor.regions import plain_image
from fovea.engine.vision.slices import Slices, UpcomingImages
from fovea.engine.visual_budget.methods import METHODS


class InParts(Protocol):
    """What encodes an image that is seen in parts."""

    def slices(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]: ...


class VisualEncoder:
    """judge, regions: what was seen where, and what is kept of it; for models whose images can be seen in parts."""

    def __init__(
        self,
        model: VisionLanguageModel,
        processor: ImageProcessor,
        outputs: EmbeddingCache[VisualFeatures],
        regions: RegionCache[VisualFeatures],
        *,
        head: Mapping[str, NDArray[np.float32]] | None = None,
    ) -> None:
        """outputs: the encoder-output cache, for whole outputs. head: what was trained for this model's relevance."""
        self._model = model
        self._processor = processor
        self._outputs = outputs
        self.relevance = RelevanceModel(partial(word_embeddings, model), head)
        self.regions = regions
        self._parts = self._in_parts()

    def _in_parts(self) -> InParts | None:
        model, processor = self._model, self._processor
        if isinstance(model, QwenVL) and isinstance(processor, QwenProcessor):
            return PartsEncoder(
                model.vision,
                processor,
                self.relevance,
                lambda array: torch.from_numpy(array).to(model.device, model.dtype),
                self.regions,
                model.visual_token_bytes,
                self._whole,
            )
        return PickedTiles(model, self.relevance) if isinstance(model, LlavaNext) else None

    def slices(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]:
        """ahead: images of which parts may be encoded along with parts of this one."""
        reduction = image.plan.reduction
        if reduction is None:
            return self._model.encode_slices(image)
        if METHODS[reduction.method].in_parts:
            assert self._parts is not None
            return self._parts.slices(image, ahead)
        return self._reduced(image, reduction)

    def _reduced(self, image: ProcessedImage, reduction: Reduction) -> Slices[VisualFeatures]:
        plain = plain_image(self._processor, image)
        whole = yield from self._whole(image)
        grid = self._grid(plain.plan.grid, reduction.full)
        with stage("reduce"):
            chosen = reducer(reduction.method).reduce(
                self._seen(plain, whole, grid, reduction), image.plan.tokens
            )
        index = chosen.index
        places = (
            torch.stack((index // grid[1], index % grid[1]), dim=1) if self._model.merge else index[:, None]
        )
        return VisualFeatures(
            chosen.embeds,
            tuple(map(chosen.gather, whole.deepstack)),
            created_at=whole.created_at,
            places=places.to(torch.int32),
        )

    def _whole(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        """All tokens of an image of which some will be kept, from the cache, or for it."""
        reduction = image.plan.reduction
        assert reduction is not None
        if reduction.whole in self._outputs:
            whole = self._outputs.get(reduction.whole)
        else:
            whole = yield from self._model.encode_slices(plain_image(self._processor, image))
        self._outputs.keep(reduction.whole, whole, whole.nbytes, whole.created_at)
        yield
        return whole

    def _grid(self, grid: tuple[int, int, int], full: int) -> tuple[int, int]:
        """Rows and columns of visual tokens; models without M-RoPE have them in a row."""
        merge = self._model.merge
        return (grid[1] // merge, grid[2] // merge) if merge else (1, full)

    def _seen(
        self, image: ProcessedImage, whole: VisualFeatures, grid: tuple[int, int], reduction: Reduction
    ) -> ReductionInput:
        needs = METHODS[reduction.method].needs
        seen = ReductionInput(whole.embeds, grid, reduction.whole)
        if "query" in needs and reduction.words:
            seen = replace(seen, query=word_embeddings(self._model, reduction.words))
        if "attention" in needs or "keys" in needs:
            assert isinstance(self._model, QwenVL)
            from fovea.engine.reduce.taps import encoder_taps

            taps = encoder_taps(self._model.vision, self._model.pixels(image), image.plan.grid)
            seen = replace(seen, attention=taps.attention, keys=taps.keys)
        if "probe" in needs:
            from fovea.engine.reduce.probe import run_probe

            # Without words the image's own last token looks back at it: any id will do to be what looks.
            words = reduction.words or (self._model.image_token_id,)
            seen = replace(seen, probe=run_probe(self._model, (), whole, words, grid))
        return seen


def word_embeddings(model: VisionLanguageModel, ids: Sequence[int]) -> Tensor:
    """The decoder's input embeddings of ids, (Q, D)."""
    rows: Tensor = model.decoder.embed_tokens(torch.tensor(ids, device=model.device))
    return rows
