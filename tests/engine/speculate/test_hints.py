"""Drafts from a request's prediction, and from earlier answers about the same image."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from fovea.core.sampling import SamplingParams
from fovea.core.types import Client
from fovea.engine.job import SequenceInputs
from fovea.engine.sequence import Sequence
from fovea.engine.speculate.answers import AnswerStore
from fovea.engine.speculate.hints import Hints
from fovea.engine.speculate.texts import LONGEST, NOTHING, Continuation
from tests.support.brains import image

LARGE = 1 << 24
PREDICTION = tuple(range(100, 160))
"""A text in which every pair of tokens occurs once."""


def predicted(*tokens: int) -> tuple[Hints, Sequence]:
    """A drafter that knows a sequence with a prediction."""
    hints, seq = Hints(AnswerStore(LARGE)), Sequence("a", [1, 2], SamplingParams(), 99)
    hints.add(seq, SequenceInputs(prediction=tokens))
    return hints, seq


def about(
    name: str, *keys: str, client: Client = ("", ""), salt: str = "", answer: list[int] | None = None
) -> Sequence:
    """A question about images, the latest last."""
    spans = tuple(image(2 * at, 1, key, at) for at, key in enumerate(keys))
    prompt = [99, 3] * len(keys) + [1, 2]
    seq = Sequence(name, prompt, SamplingParams(), 99, spans, client=client, salt=salt)
    seq.output_ids = answer or []
    return seq


def test_a_prediction_is_certain_from_the_start_as_long_as_the_answer_is_its_beginning() -> None:
    hints, seq = predicted(*PREDICTION)
    for length in (0, 1, 2, 30, 58, 60):
        expected = list(PREDICTION[length : length + 4])
        found = hints.draft(seq, list(PREDICTION[:length]), 4)
        assert found == Continuation(expected, [1.0] * len(expected), LONGEST) or not expected
        assert found.tokens == expected


@given(
    at=st.integers(1, 50),
    inserted=st.integers(0, 6),
    deleted=st.integers(0, 6),
    replaced=st.booleans(),
)
def test_a_prediction_is_followed_again_two_tokens_after_an_edit(
    at: int, inserted: int, deleted: int, replaced: bool
) -> None:
    """The answer gets other tokens at one place, lacks some, or both."""
    new = list(range(500, 500 + inserted)) if replaced else list(PREDICTION[:inserted])
    answer = [*PREDICTION[:at], *new, *PREDICTION[at + deleted :]]
    hints, seq = predicted(*PREDICTION)
    assert hints.draft(seq, answer[:at], 5).tokens == list(PREDICTION[at : at + 5])
    for length in range(at + inserted + 2, len(answer) + 1):
        assert hints.draft(seq, answer[:length], 5).tokens == answer[length : length + 5]


def test_nothing_is_drafted_from_a_prediction_that_has_nothing_to_do_with_the_answer() -> None:
    hints, seq = predicted(*PREDICTION)
    assert hints.draft(seq, [1, 2, 3], 5) == NOTHING
    hints, seq = predicted()
    assert hints.draft(seq, [1, 2, 3], 5) == NOTHING


def test_an_earlier_answer_about_the_image_is_continued() -> None:
    """The latest image comes first, and an answer counts for all of its images."""
    hints = Hints(AnswerStore(LARGE))
    first = about("a", "cat", answer=[5, 6, 7, 8])
    hints.add(first, SequenceInputs())
    hints.remove(first)
    both = about("b", "cat", "dog")
    hints.add(both, SequenceInputs())
    assert hints.draft(both, [5, 6], 9).tokens == [7, 8]
    assert hints.draft(both, [], 9).tokens == [5, 6, 7, 8]
    both.output_ids = [5, 6, 9]
    hints.remove(both)
    for keys, expected in ((("dog",), [9]), (("cat",), [9]), (("cat", "dog"), [9]), (("elk",), [])):
        seq = about("c", *keys)
        hints.add(seq, SequenceInputs())
        assert hints.draft(seq, [5, 6], 9).tokens == expected
        hints.remove(seq)


def test_a_prediction_goes_before_earlier_answers() -> None:
    hints = Hints(AnswerStore(LARGE))
    first = about("a", "cat", answer=[5, 6, 7])
    hints.add(first, SequenceInputs())
    hints.remove(first)
    seq = about("b", "cat")
    hints.add(seq, SequenceInputs(prediction=(5, 6, 8)))
    assert hints.draft(seq, [5, 6], 9).tokens == [8]
    assert hints.draft(seq, [5, 6, 8, 6, 7], 9).tokens == []
    assert hints.draft(seq, [4, 5, 6], 9).tokens == [8]
    assert hints.draft(seq, [5, 6, 8, 1, 2, 5], 9).tokens == [6, 7], (
        "the question and the answer's first token"
    )


@given(
    asks=st.lists(
        st.tuples(
            st.tuples(st.sampled_from(["", "x"]), st.sampled_from(["", "x"])),
            st.sampled_from(["", "x"]),
            st.lists(st.sampled_from(["cat", "dog"]), max_size=2, unique=True),
        ),
        max_size=16,
    )
)
def test_nothing_goes_to_another_client_tenant_salt_or_image(
    asks: list[tuple[Client, str, list[str]]],
) -> None:
    hints = Hints(AnswerStore(LARGE))
    owners: list[tuple[Client, str]] = []
    seen: set[tuple[Client, str, str]] = set()
    for number, (client, salt, keys) in enumerate(asks):
        if (client, salt) not in owners:
            owners.append((client, salt))
        own = 10 * (1 + owners.index((client, salt)))
        seq = about(str(number), *keys, client=client, salt=salt, answer=[own, own + 1])
        hints.add(seq, SequenceInputs())
        known = any((client, salt, key) in seen for key in keys)
        assert hints.draft(seq, [], 9).tokens == ([own, own + 1] if known else [])
        hints.remove(seq)
        seen.update((client, salt, key) for key in keys)
    hints.clear()
    for number, (client, salt) in enumerate(owners):
        seq = about(f"again {number}", "cat", "dog", client=client, salt=salt)
        hints.add(seq, SequenceInputs())
        assert hints.draft(seq, [], 9) == NOTHING


def test_nothing_is_left_of_sequences_that_ended() -> None:
    hints, seq = predicted(*PREDICTION)
    hints.draft(seq, [1, 2], 9)
    other = about("b", "cat", answer=[5])
    hints.add(other, SequenceInputs())
    for each in (seq, other, seq):
        hints.remove(each)
    assert not hints._predictions
    assert not hints._texts
    assert not hints._tails
