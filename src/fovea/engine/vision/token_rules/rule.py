"""A rule that counts visual tokens with the image processor of a model."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fovea.core.media import Detail, PixelBudget
from fovea.engine.vision.processor.base import ImageProcessor, VisualPlan

SIZES = 4096
"""Different sizes that a rule remembers by default; about 1 MB."""


class ProcessorRule:
    """Counts visual tokens as a model's own image processor plans them. Thread-safe.

    The count is that of `VisualPlan.tokens`: positions of the prompt that are the model's image token. Text
    between them (row breaks of Pixtral, marks of tiles) is not counted. For Llama 3.2 Vision it is 1, because
    its image states lie outside of the prompt.

    Clients repeat sizes, so the counts of the last `sizes` different calls are kept.
    """

    __slots__ = ("_count", "_processor", "honours_detail", "name")

    def __init__(
        self, name: str, processor: ImageProcessor, *, honours_detail: bool = True, sizes: int = SIZES
    ) -> None:
        """Wrap a processor.

        name: name of the model, for logs.
        honours_detail: whether the backend reads `detail`, as Fovea does. vLLM and SGLang ignore it: all
            their images have as many tokens as the model's own limit allows.
        sizes: how many counts are kept.
        """
        self.name = name
        self.honours_detail = honours_detail
        self._processor = processor
        # With types, so that true is not found as 1: the processor refuses it as a number of pixels.
        self._count = lru_cache(sizes, typed=True)(self._plan)

    def tokens(
        self,
        width: int,
        height: int,
        *,
        detail: Detail = "auto",
        images: int = 1,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> int:
        """Count the tokens of an image, see `VisualTokenRule.tokens`."""
        if not self.honours_detail:
            detail = "auto"
        try:
            return self._count(width, height, detail, images, min_pixels, max_pixels)
        except TypeError:  # a list, for example: it has no hash, and the processor refuses it by name
            return self._plan(width, height, detail, images, min_pixels, max_pixels)

    def plan(self, width: int, height: int) -> VisualPlan:
        """Return the visual plan of a single image without a budget of its own."""
        return self._processor.plan(width, height, PixelBudget())

    def cache_info(self) -> Any:
        """Hits, misses and size of the cache, see `functools.lru_cache`."""
        return self._count.cache_info()

    def _plan(
        self,
        width: int,
        height: int,
        detail: Detail,
        images: int,
        min_pixels: int | None,
        max_pixels: int | None,
    ) -> int:
        budget = PixelBudget(detail, min_pixels, max_pixels)
        return self._processor.plan(width, height, budget, images=images).tokens
