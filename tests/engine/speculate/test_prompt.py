"""Drafts from a sequence's own prompt and answer."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from fovea.core.sampling import SamplingParams
from fovea.engine.job import SequenceInputs
from fovea.engine.sequence import Sequence
from fovea.engine.speculate.drafter import without_images
from fovea.engine.speculate.prompt import PromptLookup
from fovea.engine.speculate.texts import NOTHING
from tests.engine.speculate.test_texts import search
from tests.support.brains import image

INPUTS = SequenceInputs()
TOKENS = st.lists(st.integers(0, 3), max_size=30)


def begun(prompt: list[int], *spans: tuple[int, int]) -> tuple[PromptLookup, Sequence]:
    """A drafter that knows a sequence. spans: start and length of each image."""
    images = tuple(image(start, length, f"{i}", i) for i, (start, length) in enumerate(spans))
    drafter, seq = PromptLookup(), Sequence("a", prompt, SamplingParams(), 99, images)
    drafter.add(seq, INPUTS)
    return drafter, seq


def test_a_phrase_of_the_prompt_is_continued() -> None:
    drafter, seq = begun([5, 6, 7, 8, 1])
    assert drafter.draft(seq, [5], 9) == NOTHING
    assert drafter.draft(seq, [5, 6], 2).tokens == [7, 8]
    assert drafter.draft(seq, [5, 6, 7], 9).tokens == [8, 1, 5, 6], "the answer stands behind the prompt"


def test_an_answer_repeats_itself() -> None:
    drafter, seq = begun([9])
    answer: list[int] = []
    for token in (1, 2, 3, 1):
        answer.append(token)
        assert drafter.draft(seq, answer, 9) == NOTHING
    assert drafter.draft(seq, [*answer, 2], 9).tokens == [3, 1]


def test_no_match_contains_an_image_and_no_draft_crosses_one() -> None:
    drafter, seq = begun([1, 2, 7, 7, 3, 4, 7, 5], (2, 2), (6, 1))
    assert drafter.draft(seq, [1, 2], 9).tokens == []
    assert drafter.draft(seq, [3, 4], 9).tokens == []
    drafter, seq = begun([7, 7, 7, 3], (0, 3))
    assert drafter.draft(seq, [7, 7], 9) == NOTHING


@given(prompt=TOKENS, answer=TOKENS.filter(bool), data=st.data())
def test_drafts_are_those_of_a_search_of_prompt_and_answer(
    prompt: list[int], answer: list[int], data: st.DataObject
) -> None:
    """However many tokens each step adds. The newest ones do not find themselves."""
    start = data.draw(st.integers(0, len(prompt)))
    length = data.draw(st.integers(0, len(prompt) - start))
    drafter, seq = begun(prompt, *([(start, length)] if length else []))
    known = 0
    while known < len(answer):
        count = data.draw(st.integers(1, len(answer) - known))
        read, known = known, known + count
        text = [-1, *without_images(seq), *answer[:read]]
        assert drafter.draft(seq, answer[:known], 5) == search([text], answer[:known], 5)


def test_a_token_that_is_computed_again_is_read_once() -> None:
    """The guide of an answer was late: of three new tokens only the first counted, and the others came again.

    They were then written twice, so that later drafts were wrong.
    """
    drafter, seq = begun([9])
    drafter.draft(seq, [1, 2, 3, 4], 9)
    drafter.draft(seq, [1, 2], 9)
    drafter.draft(seq, [1, 2, 3], 9)
    drafter.draft(seq, [1, 2, 3, 4, 5, 1, 2], 9)
    assert drafter.draft(seq, [1, 2, 3, 4, 5, 1, 2, 3], 9).tokens == [4, 5, 1, 2]


def test_nothing_is_left_of_a_sequence_that_ended() -> None:
    drafter, seq = begun([1, 2, 3])
    drafter.draft(seq, [1, 2], 9)
    drafter.remove(seq)
    drafter.remove(seq)
    assert not drafter._readings
    drafter.add(seq, INPUTS)
    drafter.clear()
    assert drafter.draft(seq, [1, 2], 9).tokens == [3], "the own text of a running sequence stays"
