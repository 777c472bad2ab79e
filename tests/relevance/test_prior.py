"""The prior of the tensions: the effects of a question's words and of an image's statistics."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fovea.relevance.balancing import BUSYNESS, SHARPNESS, SMOOTH, prior

shares = st.floats(0, 1, width=32)


def image(busy: float = 0.3, sharpest: float = 0.2) -> np.ndarray:
    """Statistics of an image, in the form of `Survey.statistics`."""
    statistics = np.full(10, 0.7, np.float32)
    statistics[BUSYNESS], statistics[SHARPNESS] = busy, sharpest
    return statistics


@given(st.text(max_size=40), shares, st.floats(0, 1, width=32))
def test_priors_lie_in_their_ranges(question: str, busy: float, sharpest: float) -> None:
    result = prior(question, image(busy, sharpest))
    assert result.compress in (0.15, 0.5, 0.6, 0.85)
    assert result.exploit == 0.8
    assert 0.4 <= result.focus <= 0.9


READING = (
    "Read the sign.", "WHAT TEXT IS THERE?", "What is written here?", "What are the letters?",
    "which digits", "the code", "Who wrote small words?", "the tiny thing", "Any details?",
    "Count the letters", "Describe every detail of all",
)  # fmt: skip
WHOLE = (
    "How many circles are there?", "count them", "List the things", "Describe the picture.",
    "Is everything blue?", "Are all of them red?", "every one", "Compare both", "What scene is this?",
    "overall?",
)  # fmt: skip
NEITHER = ("What is in the red circle?", "", "Is the bread on the wall?", "an account, a recount, a context")


@pytest.mark.parametrize(
    ("questions", "sharp", "smooth"),
    [(READING, 0.15, 0.15), (WHOLE, 0.85, 0.85), (NEITHER, 0.5, 0.6)],
)
def test_questions_about_text_need_detail_and_questions_about_counts_need_the_whole(
    questions: tuple[str, ...], sharp: float, smooth: float
) -> None:
    """Reading takes precedence over counting, and only whole words count.

    An image without fine detail loses nothing at a lower resolution.
    """
    for question in questions:
        assert prior(question, image(sharpest=0.2)).compress == sharp, question
        assert prior(question, image(sharpest=SMOOTH)).compress == sharp, question
        assert prior(question, image(sharpest=SMOOTH - 0.01)).compress == smooth, question


@given(shares, shares)
def test_a_busy_image_has_a_lower_focus(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert prior("", image(high)).focus <= prior("", image(low)).focus
    result = [prior("", image(busy)).focus for busy in (0.0, 0.25, 0.6, 1.0)]
    assert result == pytest.approx([0.9, 0.7, 0.42, 0.4], abs=1e-6)


def test_the_prior_uses_no_other_statistics() -> None:
    for number in range(10):
        other = image()
        other[number] = 0.01 if number in (BUSYNESS, SHARPNESS) else 0.9
        changed = prior("What is it?", other) != prior("What is it?", image())
        assert changed == (number in (BUSYNESS, SHARPNESS))
