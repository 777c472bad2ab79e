"""Tests of the relevance model: it remembers the latest realizations."""

from __future__ import annotations

import numpy as np

from fovea.engine.regions.any_size import MAX_REALIZATIONS, RelevanceModel
from fovea.engine.vision.processor.base import Reduction
from fovea.relevance.balancing import Tensions
from fovea.relevance.pipeline import survey
from fovea.relevance.policy import attend

TENSIONS = Tensions(0.5, 0.8, 0.7)


def test_a_reused_realization_becomes_the_most_recent_one() -> None:
    """Before, a reused realization kept its age, so later answers that reused it had no explanation."""
    model = RelevanceModel(lambda ids: None)  # type: ignore[arg-type, return-value]
    blank = survey(np.zeros((128, 128, 3), np.uint8), 32)

    def realize_image(key: str) -> None:
        reduction = Reduction("relevance", 16, "whole", key)
        model.realize(blank, reduction, 8, TENSIONS, blank.propositional, attend)

    for number in range(MAX_REALIZATIONS):
        realize_image(f"image {number}")
    first = model.reuse_realization("image 0")
    assert first is not None
    realize_image("another")
    assert model.recent_realization("image 0") is first
    assert model.recent_realization("image 1") is None
    assert model.reuse_realization("image 1") is None
