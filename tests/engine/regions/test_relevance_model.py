"""What was seen where is remembered of the images that were answered about last."""

from __future__ import annotations

import numpy as np

from fovea.engine.regions.relevance_model import MAX_REALIZATIONS, RelevanceModel
from fovea.engine.vision.processor.base import Reduction
from fovea.relevance.balancing import Tensions
from fovea.relevance.pipeline import survey
from fovea.relevance.policy import attend

TENSIONS = Tensions(0.5, 0.8, 0.7)


def test_what_is_shown_once_more_is_of_late_again() -> None:
    """An answer that came from what was known already had no explanation, once 256 other images had been seen since the first."""
    judge = RelevanceModel(lambda ids: None)  # type: ignore[arg-type, return-value]
    seen = survey(np.zeros((128, 128, 3), np.uint8), 32)

    def look(key: str) -> None:
        reduction = Reduction("relevance", 16, "whole", key)
        judge.realize(seen, reduction, 8, TENSIONS, ((1, 1), None), attend)  # type: ignore[arg-type]

    for number in range(MAX_REALIZATIONS):
        look(f"image {number}")
    found = judge.reuse_realization("image 0")
    assert found is not None
    look("another")
    assert judge.recent_realization("image 0") is found
    assert judge.recent_realization("image 1") is None
    assert judge.reuse_realization("image 1") is None
