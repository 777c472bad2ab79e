"""Stores of earlier answers: bounded, the least recently used leave first, nothing goes to another key."""

from __future__ import annotations

from collections import OrderedDict

import hypothesis.strategies as st
from hypothesis import given

from fovea.core.sampling import SamplingParams
from fovea.core.types import Client, FinishReason
from fovea.engine.job import SequenceInputs
from fovea.engine.sequence import Sequence
from fovea.engine.speculate.answers import SHARE, AnswerStore, EarlierAnswers, latest
from fovea.engine.speculate.drafter import TAIL, prompt_tail, without_images
from fovea.engine.speculate.texts import BORDER, LONGEST, NOTHING, Texts
from tests.support.brains import image

LARGE = 1 << 24
INPUTS = SequenceInputs()


def asked(
    name: str,
    prompt: list[int],
    answer: list[int] | None = None,
    client: Client = ("", ""),
    salt: str = "",
    reason: FinishReason = "stop",
) -> Sequence:
    """A sequence that has ended with an answer."""
    seq = Sequence(name, prompt, SamplingParams(), 99, client=client, salt=salt)
    seq.output_ids, seq.finish_reason = answer or [], reason
    return seq


@given(
    adds=st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 50), max_size=60)), min_size=1, max_size=40
    ),
    room=st.integers(4400, 30_000),
)
def test_a_store_stays_below_its_bound_and_forgets_the_oldest_keys(
    adds: list[tuple[int, list[int]]], room: int
) -> None:
    store, model = AnswerStore(room), OrderedDict[int, Texts]()
    for key, tokens in adds:
        store.add(key, tokens)
        model.setdefault(key, Texts(room // SHARE)).add(tokens)
        model.move_to_end(key)
        while sum(texts.nbytes for texts in model.values()) > room:
            model.popitem(last=False)
        assert store.nbytes == sum(texts.nbytes for texts in model.values()) <= room
        assert key in model, "the key that was just used stays"
        for number in range(6):
            expected = model[number].follow(tokens[:5], 4).tokens if number in model else []
            assert store.follow([number], tokens[:5], 4).tokens == expected
    store.clear()
    assert store.nbytes == 0
    assert store.follow(range(6), adds[0][1], 4) == NOTHING


def test_a_store_without_memory_keeps_nothing() -> None:
    store = AnswerStore(0)
    store.add("a", [1, 2, 3])
    assert store.nbytes == 0
    assert store.follow(["a"], [1, 2], 4) == NOTHING


def test_one_long_answer_does_not_make_the_others_forgotten() -> None:
    store = AnswerStore(40_000)
    store.add("a", [1, 2, 3])
    store.add("b", list(range(5000)))
    assert store.follow(["a"], [1, 2], 1).tokens == [3]
    assert store.follow(["b"], [4997, 4998], 1).tokens == [4999]


def test_the_first_key_with_a_match_decides() -> None:
    store = AnswerStore(LARGE)
    store.add("a", [1, 2, 3])
    store.add("b", [1, 2, 4])
    store.add("b", [6, 7, 8])
    assert store.follow(["none", "a", "b"], [1, 2], 1).tokens == [3]
    assert store.follow(["b", "a"], [1, 2], 1).tokens == [4]
    assert store.follow(["a", "b"], [6, 7], 1).tokens == [8]


OWNERS = st.tuples(
    st.tuples(st.sampled_from(["", "x", "y"]), st.sampled_from(["", "x", "t"])),
    st.sampled_from(["", "x", "salt"]),
)


@given(asks=st.lists(st.tuples(OWNERS, st.integers(0, 7)), min_size=1, max_size=24))
def test_no_answer_is_ever_a_draft_for_another_client_tenant_or_salt(
    asks: list[tuple[tuple[Client, str], int]],
) -> None:
    """All of them ask the same question. The tokens of an answer belong to its owner alone."""
    drafter = EarlierAnswers(AnswerStore(LARGE))
    owners: list[tuple[Client, str]] = []
    for number, (owner, count) in enumerate(asks):
        if owner not in owners:
            owners.append(owner)
        own = 100 * (1 + owners.index(owner))
        client, salt = owner
        seq = asked(f"{number}", [1, 2, 3], [own + token for token in range(1 + count)], client, salt)
        drafter.add(seq, INPUTS)
        found = drafter.draft(seq, [], 9)
        assert found.tokens == list(range(own, own + len(found.tokens)))
        assert bool(found.tokens) == any(earlier == owner for earlier, _ in asks[:number])
        drafter.remove(seq)
    drafter.clear()
    for number, (client, salt) in enumerate(owners):
        seq = asked(f"again {number}", [1, 2, 3], client=client, salt=salt)
        drafter.add(seq, INPUTS)
        assert drafter.draft(seq, [], 9) == NOTHING


def test_an_answer_is_found_by_its_question_and_continues_by_its_own_tokens() -> None:
    drafter = EarlierAnswers(AnswerStore(LARGE))
    seq = asked("a", [9, 1, 2], [5, 6, 7, 8])
    drafter.add(seq, INPUTS)
    drafter.remove(seq)
    again = asked("b", [3, 1, 2])
    drafter.add(again, INPUTS)
    assert drafter.draft(again, [], 9).tokens == [5, 6, 7, 8]
    assert drafter.draft(again, [], 9).matched == 2
    assert drafter.draft(again, [5], 2).tokens == [6, 7]
    assert drafter.draft(again, [4], 9) == NOTHING
    assert drafter.draft(again, [4, 6, 7], 9).tokens == [8]


def test_a_failed_or_empty_answer_is_not_kept() -> None:
    store = AnswerStore(LARGE)
    drafter = EarlierAnswers(store)
    failed, empty = asked("a", [1, 2], [5, 6], reason="error"), asked("b", [1, 2], [])
    for seq in (failed, empty):
        drafter.add(seq, INPUTS)
        drafter.remove(seq)
    drafter.remove(asked("unknown", [1, 2], [7]))
    assert store.nbytes == 0
    cancelled = asked("c", [1, 2], [5, 6], reason="abort")
    drafter.add(cancelled, INPUTS)
    drafter.remove(cancelled)
    drafter.add(failed, INPUTS)
    assert drafter.draft(failed, [], 9).tokens == [5, 6], "tokens of an answer that a client left are right"


def test_nothing_is_left_of_sequences_that_ended() -> None:
    drafter = EarlierAnswers(AnswerStore(LARGE))
    for number in range(9):
        seq = asked(str(number), [1, 2], [5])
        drafter.add(seq, INPUTS)
        drafter.remove(seq)
        drafter.remove(seq)
    assert not drafter._tails


@given(st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 9), max_size=40))
def test_the_latest_tokens_are_the_end_of_prompt_and_answer(tail: list[int], answer: list[int]) -> None:
    assert list(latest(tail, answer)) == [*tail, *answer][-LONGEST:]


def test_images_are_not_text() -> None:
    seq = Sequence(
        "a", [1, 2, 99, 99, 3, 99, 4], SamplingParams(), 9, (image(2, 2, "cat"), image(5, 1, "dog", 1))
    )
    assert without_images(seq) == [1, 2, BORDER, 3, BORDER, 4]
    assert prompt_tail(seq) == [4]
    long = Sequence("b", list(range(2 * TAIL)), SamplingParams(), 9)
    assert prompt_tail(long) == list(range(TAIL, 2 * TAIL))
    assert without_images(long) == long.prompt_ids
