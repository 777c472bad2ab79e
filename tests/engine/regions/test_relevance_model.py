"""Tests of the relevance model: it remembers the latest realizations, and its tensions follow the load."""

from __future__ import annotations

import numpy as np
import pytest

from fovea.engine.regions.relevance_model import MAX_REALIZATIONS, RelevanceModel
from fovea.engine.vision.processor.base import Reduction
from fovea.relevance.balancing import Tensions
from fovea.relevance.pipeline import Survey, survey
from fovea.relevance.policy import attend

TENSIONS = Tensions(0.5, 0.8, 0.7)


@pytest.fixture
def model() -> RelevanceModel:
    """Without a model, because nothing here looks."""
    return RelevanceModel(None, heads=[(0, 0)])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def blank() -> Survey:
    return survey(np.zeros((128, 128, 3), np.uint8), 32)


def test_a_reused_realization_becomes_the_most_recent_one(model: RelevanceModel, blank: Survey) -> None:
    """Before, a reused realization kept its age, so later answers that reused it had no explanation."""

    def realize_image(key: str) -> None:
        reduction = Reduction("relevance", 16, "whole", key)
        model.realize(blank, reduction, 8, TENSIONS, None, attend)

    for number in range(MAX_REALIZATIONS):
        realize_image(f"image {number}")
    first = model.reuse_realization("image 0")
    assert first is not None
    realize_image("another")
    assert model.recent_realization("image 0") is first
    assert model.recent_realization("image 1") is None
    assert model.reuse_realization("image 1") is None


def test_tensions_follow_the_question_the_look_and_the_load(model: RelevanceModel, blank: Survey) -> None:
    even = np.ones((4, 4), np.float32)
    peak = np.zeros((4, 4), np.float32)
    peak[1, 2] = 1

    def tensions(question: str, load: float, asked: np.ndarray | None) -> Tensions:
        return model.tensions(blank, Reduction("relevance", 16, "", "", "", question, load=load), asked)

    assert tensions("what?", 0, peak).compress == pytest.approx(0.1)
    assert tensions("what?", 0, even).compress == pytest.approx(0.65)
    assert tensions("", 0, None).compress == 0.5
    assert tensions("count them", 0, peak).compress == 0.85
    calm, busy = (tensions("what?", load, peak) for load in (0.0, 1.0))
    assert (calm.exploit, busy.exploit) == (0.8, 1.0)
    assert calm.focus < busy.focus == 1
