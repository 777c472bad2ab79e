"""The budget `auto`: all tokens, unless the question's words are about a part of a large image."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fovea.relevance.enough import LEAST_SHARE, PARTS, asks_for_part, enough_tokens
from fovea.relevance.policy import LARGE_IMAGE
from fovea.relevance.realizing import SIDE

sides = st.integers(1, 60)


def maps(content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The propositional map of this content, and a perspectival map without any."""
    return content.astype(np.float32), np.zeros(content.shape, np.float32)


def page(*filled: tuple[int, int]) -> np.ndarray:
    """A page of 42x56 cells with blocks of 10x10 cells with content, at some of three rows of four places."""
    content = np.zeros((3 * SIDE, 4 * SIDE), bool)
    for row, column in filled:
        top, left = row * SIDE + 2, column * SIDE + 2
        content[top : top + 10, left : left + 10] = True
    return content


@pytest.mark.parametrize(
    "question",
    [
        "What is written on the sign?", "Read it", "WHERE is the dog?", "Which colour is the car?",
        "the top left corner", "What's the price? What is it?", "What does it say?", "Whose name is this?",
    ],
)  # fmt: skip
def test_questions_about_a_part(question: str) -> None:
    assert asks_for_part(question)


@pytest.mark.parametrize(
    "question",
    [
        "", "Describe the picture.", "How many signs are there?", "Is it blue?", "Read everything.",
        "What is in every box?", "Was steht auf dem Schild?", "the signature of nowhere", "readable",
        "List the names that are written here", "What is in the image? Summarize it.",
        "Explain what is shown here.", "Transcribe the whole page word by word", "What are the differences?",
        "What does this document say?", "What is the number of people?", "Was steht auf dem Label?",
        "What are the objects in this picture?",
    ],
)  # fmt: skip
def test_questions_about_all_of_an_image_or_in_other_words(question: str) -> None:
    """A question that is not understood keeps all tokens. Some of these lost nine tenths of them once."""
    assert not asks_for_part(question)
    assert enough_tokens(question, *maps(page((0, 0)))) == 12 * SIDE**2


def test_room_for_the_three_parts_with_the_most_content() -> None:
    """The view of the whole takes 18% of the total, so the parts have 82%."""
    places = [(0, 0), (1, 2), (2, 3), (0, 3), (2, 0)]
    one, three, five = (enough_tokens("Read it", *maps(page(*places[:count]))) for count in (1, 3, 5))
    assert PARTS == 3
    assert one == LEAST_SHARE * 12 * SIDE**2 == 147, "not less than a sixteenth"
    assert three == five == -(-3 * 100 * 100 // 82)
    assert enough_tokens("Read it", *maps(page())) == 147


def test_a_small_image_keeps_all_tokens() -> None:
    rows, columns = 16, LARGE_IMAGE // 16
    assert enough_tokens("Read it", *maps(np.zeros((rows, columns - 1), bool))) == rows * (columns - 1)
    assert enough_tokens("Read it", *maps(np.zeros((rows, columns), bool))) == rows * columns // 16


@given(sides, sides, st.floats(0, 1), st.integers(0, 99), st.sampled_from(("Read it", "Describe it", "")))
def test_it_is_a_number_of_tokens_of_the_image_and_grows_with_its_content(
    rows: int, columns: int, filled: float, seed: int, question: str
) -> None:
    draw = np.random.default_rng(seed).random((rows, columns))
    result = enough_tokens(question, *maps(draw < filled))
    assert 1 <= result <= rows * columns
    assert result >= rows * columns * LEAST_SHARE
    # Regions of other content are cut elsewhere, so that a little less may suffice.
    assert enough_tokens(question, *maps(np.ones((rows, columns), bool))) >= 0.9 * result
