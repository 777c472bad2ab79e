"""Tests of benchmarks/relevance_ablation.py: comparisons, and that every variant changes decisions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from fovea.cli.questions import visual_of
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model
from fovea.evaluation.datasets import Case, scene_cases
from fovea.evaluation.scenes import HELD_OUT_SEED
from fovea.evaluation.score import PairedCounts
from fovea.evaluation.sweep import ALL, DETAILS, OTHERS
from fovea.relevance.pipeline import Realization
from relevance_ablation import EVERYTHING, VARIANTS, Ablation, Chunk, body, markdown
from relevance_encoder import RelevanceEncoder

OTHER_VARIANT = "no perspectival map"


@pytest.fixture
def ablation() -> Ablation:
    right = {(EVERYTHING, 0.1): (True, True, False), (OTHER_VARIANT, 0.1): (False, True, False)}
    return Ablation(("small_text", "colour", "colour"), right)


def test_variants_are_compared_with_everything(ablation: Ablation) -> None:
    assert ablation.groups == (DETAILS, OTHERS, ALL)
    assert ablation.compare(OTHER_VARIANT, 0.1) == PairedCounts(1, 0, 1, 1)
    assert ablation.compare(OTHER_VARIANT, 0.1, OTHERS) == PairedCounts(1, 0, 0, 1)
    rows = [line for line in markdown(ablation).splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["taken away", "-" * 19, "nothing", OTHER_VARIANT]
    assert "-33.3 (" in rows[-1]
    assert [entry["accuracy"] for entry in body(ablation)] == [1, 0.5, 2 / 3, 0, 0.5, 1 / 3]


def test_the_other_question_is_that_of_the_next_case_with_another_text() -> None:
    cases = list(scene_cases(2, ("colour", "counting"), HELD_OUT_SEED))
    others = chunk_of(cases, budget=None).other_questions()
    texts = [case.exchanges[0].question for case in cases]
    given = [others[visual_of(case)[0].identity] for case in cases]
    assert given[0] == texts[1]
    assert all(text != other for text, other in zip(texts, given, strict=True))


def chunk_of(cases: list[Case], budget: Any) -> Chunk:
    return Chunk([(case, visual_of(case)) for case in cases], budget)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    large = list(scene_cases(2, ("small_text", "small_object"), HELD_OUT_SEED, sizes=((1024, 1024),)))
    return [*large, *scene_cases(1, ("counting", "reading"), HELD_OUT_SEED)]


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load_model("fovea-tiny", EngineConfig())


def decide(loaded: Any, cases: list[Case], variant: str) -> list[Realization]:
    """The decisions about all cases at a tenth and a fortieth of the tokens."""
    encoder = RelevanceEncoder(loaded, caches=True)
    with VARIANTS[variant](chunk_of(cases, encoder.budget)):
        return [
            encoder.realize(encoder.prepare(case.images[0], case.exchanges[0].question, keep))
            for case in cases
            for keep in (0.1, 0.025)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != EVERYTHING])
def test_every_variant_changes_decisions(variant: str, loaded: Any, cases: list[Case]) -> None:
    """A variant that replaces a function which the engine no longer calls would change nothing."""
    pairs = zip(decide(loaded, cases, EVERYTHING), decide(loaded, cases, variant), strict=True)
    changes = [
        not np.array_equal(usual.relevance, other.relevance) or usual.allocation != other.allocation
        for usual, other in pairs
    ]
    assert any(changes)
    # Nothing stays replaced.
    again = zip(decide(loaded, cases[:1], EVERYTHING), decide(loaded, cases[:1], EVERYTHING), strict=True)
    assert all(one.allocation == other.allocation for one, other in again)
