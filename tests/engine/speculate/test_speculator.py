"""The choice between drafters by their measured acceptance."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from random import Random
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.core.sampling import SamplingParams
from fovea.engine.job import SequenceInputs
from fovea.engine.schedule.draft_budget import DraftBudget
from fovea.engine.schedule.step_times import StepTimes
from fovea.engine.sequence import NO_DRAFTS, Drafts, Sequence
from fovea.engine.speculate import speculator as speculators
from fovea.engine.speculate.acceptance import MEMORY, PRIOR, Acceptance, RequestAcceptance, compare
from fovea.engine.speculate.drafter import Drafter
from fovea.engine.speculate.speculator import (
    LEAST_CHANCE,
    LOOK_AFTER,
    REFUSALS,
    REST,
    DraftRequest,
    Speculator,
)
from fovea.engine.speculate.texts import NOTHING, Continuation

INPUTS = SequenceInputs()


class Planned:
    """A drafter that finds what a test wants. calls: the answers for which it was asked."""

    def __init__(self, name: str, found: Continuation = NOTHING) -> None:
        self.name, self.found = name, found
        self.calls: list[list[int]] = []
        self.known: set[str] = set()
        self.cleared = 0

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        self.known.add(seq.id)

    def draft(self, seq: Sequence, answer: Seq[int], most: int) -> Continuation:
        assert seq.id in self.known
        self.calls.append(list(answer))
        tokens, shares, matched = self.found
        return Continuation(tokens[:most], shares[:most], matched)

    def remove(self, seq: Sequence) -> None:
        self.known.remove(seq.id)

    def clear(self) -> None:
        self.cleared += 1


def sure(*tokens: int, share: float = 1.0, matched: int = 8) -> Continuation:
    return Continuation(list(tokens), [share] * len(tokens), matched)


def sequence(name: str = "a", *, speculate: bool = True) -> Sequence:
    return Sequence(name, [1], SamplingParams(), 999, speculate=speculate)


def speculating(drafters: Seq[Drafter], most: int = 5) -> Speculator:
    return Speculator(drafters, most, DraftBudget(StepTimes()))


def propose(speculator: Speculator, seq: Sequence, *tokens: int) -> Drafts:
    """Return the drafts of what follows an answer and new tokens."""
    return speculator.propose([DraftRequest(seq, list(tokens))]).get(seq.id, NO_DRAFTS)


def advance(speculator: Speculator, seq: Sequence, *tokens: int) -> Drafts:
    """Let a step give an answer tokens. Returns the drafts of what follows them."""
    drafts = propose(speculator, seq, *tokens)
    seq.append(tokens)
    return drafts


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_chances_converge_to_the_true_rate_whatever_the_share_says(rate: float, share: float) -> None:
    acceptance, dice = Acceptance(), Random(3)
    assert acceptance.chance("prompt", share, 4) == pytest.approx(share)
    for _ in range(2 * MEMORY):
        acceptance.note("prompt", share, 4, right=dice.random() < rate)
    assert acceptance.chance("prompt", share, 4) == pytest.approx(rate, abs=0.06)
    assert acceptance.chance("prompt", share, 16) == pytest.approx(share), "other lengths are others' counts"
    assert acceptance.chance("answers", share, 4) == pytest.approx(share)


def test_old_comparisons_lose_weight() -> None:
    acceptance = Acceptance()
    for _ in range(10_000):
        acceptance.note("prompt", 1.0, 4, right=True)
    for _ in range(2 * MEMORY):
        acceptance.note("prompt", 1.0, 4, right=False)
    assert acceptance.chance("prompt", 1.0, 4) < 0.25


@given(
    st.lists(
        st.tuples(st.floats(0, 1, exclude_min=True), st.sampled_from([0, 2, 3, 5, 9, 16]), st.booleans()),
        max_size=60,
    )
)
def test_chances_and_factors_stay_in_their_range(notes: list[tuple[float, int, bool]]) -> None:
    acceptance, own = Acceptance(), RequestAcceptance()
    for share, matched, right in notes:
        chance = acceptance.chance("prompt", share, matched)
        assert 0 <= chance <= 1
        own.note(chance, right=right)
        acceptance.note("prompt", share, matched, right=right)
        assert own.factor > 0
    assert len(acceptance._counts) <= 11 * 5


def test_a_request_whose_drafts_are_worse_than_usual_has_a_small_factor() -> None:
    own = RequestAcceptance()
    assert own.factor == 1.0
    for _ in range(24):
        own.note(0.5, right=False)
    assert own.factor == pytest.approx(PRIOR / (PRIOR + 12))


@given(drafts=st.lists(st.integers(0, 2), max_size=6), tokens=st.lists(st.integers(0, 2), max_size=6))
def test_drafts_are_compared_up_to_the_first_wrong_one(drafts: list[int], tokens: list[int]) -> None:
    equal = 0
    while equal < min(len(drafts), len(tokens)) and drafts[equal] == tokens[equal]:
        equal += 1
    wrong = [False] if equal < min(len(drafts), len(tokens)) else []
    assert compare(Continuation(drafts, [1.0] * len(drafts), 2), tokens) == [True] * equal + wrong


def chosen(*found: Continuation) -> Drafts:
    """The choice between the drafters "a", "b" and so on before anything is known of them."""
    drafters = [Planned(name, each) for name, each in zip("abc", found, strict=False)]
    speculator, seq = speculating(drafters), sequence()
    speculator.add(seq, INPUTS)
    return propose(speculator, seq, 1)


def test_the_drafter_that_is_expected_to_be_right_for_longest_is_chosen() -> None:
    best = chosen(sure(5, 6), sure(7, 8, 9, share=0.9), NOTHING)
    assert best._replace(chances=()) == Drafts([7, 8, 9], (), 0, "b")
    assert best.chances == pytest.approx([0.9, 0.81, 0.729])
    assert chosen(sure(5, 6), sure(7, 8, 9, share=0.5)).drafter == "a"
    assert chosen(NOTHING, sure(5), sure(5)).drafter == "b", "among equals the first one"
    assert chosen(NOTHING, NOTHING) == NO_DRAFTS


def test_a_drafter_that_was_wrong_gives_way_to_one_that_was_not_computed() -> None:
    """Both are compared with what the answer gets, although only one of them had rows."""
    wrong, right = Planned("prompt", sure(5, 5, 5)), Planned("answers", sure(1, 1, 1, share=0.4))
    speculator, seq = speculating([wrong, right]), sequence()
    speculator.add(seq, INPUTS)
    assert advance(speculator, seq, 1).drafter == "prompt"
    names = [advance(speculator, seq, 1).drafter for _ in range(40)]
    assert names[-1] == "answers"
    assert names == sorted(names, key="answers".__eq__), "it does not change its mind"


def test_no_more_drafts_than_allowed_and_none_that_is_hardly_ever_right() -> None:
    drafter = Planned("prompt", sure(*range(9)))
    speculator, seq = speculating([drafter], 3), sequence()
    speculator.add(seq, INPUTS)
    assert advance(speculator, seq, 9).tokens == [0, 1, 2]
    drafter.found = sure(0, 1, 2, share=0.4, matched=2)
    chances = advance(speculator, seq, 9).chances
    assert len(chances) == 2
    assert all(chance >= LEAST_CHANCE for chance in chances)
    drafter.found = sure(0, share=LEAST_CHANCE / 2)
    assert advance(speculator, seq, 9) == NO_DRAFTS
    drafter.found = NOTHING
    assert advance(speculator, seq, 9) == NO_DRAFTS


@given(
    shares=st.lists(st.floats(0, 1, exclude_min=True), max_size=6),
    right=st.lists(st.booleans(), max_size=60),
)
def test_chances_never_rise_along_the_drafts(shares: list[float], right: list[bool]) -> None:
    drafter = Planned("prompt", Continuation(list(range(len(shares))), shares, 3))
    speculator, seq = speculating([drafter], 6), sequence()
    speculator.add(seq, INPUTS)
    for each in right:
        chances = advance(speculator, seq, 0 if each else 99).chances
        assert list(chances) == sorted(chances, reverse=True)
        assert all(LEAST_CHANCE <= chance <= 1 for chance in chances)


def test_a_token_that_was_late_does_not_spoil_the_comparison() -> None:
    """The step gave three tokens, but only the first one counted, because its guide was late."""
    drafter = Planned("prompt", sure(4, 5, 6))
    speculator, seq = speculating([drafter]), sequence()
    speculator.add(seq, INPUTS)
    advance(speculator, seq, 1)
    propose(speculator, seq, 4, 5, 6)
    seq.append([4])
    counts = {key: list(value) for key, value in speculator.acceptance._counts.items()}
    drafter.found = sure(7)
    propose(speculator, seq, 5)  # the drafts before it followed another length
    assert counts == speculator.acceptance._counts
    seq.append([5])
    propose(speculator, seq, 7)
    ((right, seen),) = speculator.acceptance._counts.values()
    assert (right, seen) == (4, 4)


def test_a_late_token_alone_is_compared_once() -> None:
    drafter = Planned("prompt", sure(4, 5, 6))
    speculator, seq = speculating([drafter]), sequence()
    speculator.add(seq, INPUTS)
    propose(speculator, seq, 1)  # it comes later, and no other token before it
    seq.append([1])
    propose(speculator, seq, 4)
    assert list(speculator.acceptance._counts.values()) == [[1, 1]]


def test_while_drafts_are_not_worth_their_rows_they_are_only_looked_for_now_and_then() -> None:
    drafter, budget = Planned("prompt", sure(1, 1, 1, share=0.5)), DraftBudget(StepTimes())
    budget.worthwhile = False
    speculator, seq = Speculator([drafter], 5, budget), sequence()
    speculator.add(seq, INPUTS)
    before = speculator.acceptance.chance("prompt", 0.5, 8)
    for step in range(1, 10 * LOOK_AFTER + 1):
        assert advance(speculator, seq, 1) == NO_DRAFTS
        assert len(drafter.calls) == step // LOOK_AFTER
    assert [len(answer) for answer in drafter.calls] == [LOOK_AFTER * i for i in range(1, 11)]
    advance(speculator, seq, 1)
    assert speculator.acceptance.chance("prompt", 0.5, 8) > before, "the drafter is judged all the same"
    budget.worthwhile = True
    assert advance(speculator, seq, 1).tokens == [1, 1, 1]
    assert advance(speculator, seq, 1).tokens == [1, 1, 1]


def test_a_sequence_without_speculation_is_never_looked_at() -> None:
    drafter = Planned("prompt", sure(1))
    speculator, seq = speculating([drafter]), sequence(speculate=False)
    speculator.add(seq, INPUTS)
    assert not drafter.known
    assert advance(speculator, seq, 1) == NO_DRAFTS
    speculator.remove(seq)
    assert not drafter.calls


def test_nothing_is_left_of_sequences_that_ended() -> None:
    drafters = Planned("prompt", sure(1)), Planned("answers")
    speculator = speculating(drafters)
    for name in "abc":
        seq = sequence(name)
        speculator.add(seq, INPUTS)
        advance(speculator, seq, 1)
        speculator.remove(seq)
        speculator.remove(seq)
        assert advance(speculator, seq, 1) == NO_DRAFTS
    assert not speculator._records
    assert not any(drafter.known for drafter in drafters)
    speculator.clear()
    assert [drafter.cleared for drafter in drafters] == [1, 1]


def test_sequences_do_not_mix() -> None:
    drafter = Planned("prompt", sure(7))
    speculator = speculating([drafter])
    first, second = sequence("a"), sequence("b")
    for seq in (first, second):
        speculator.add(seq, INPUTS)
    advance(speculator, first, 1, 2)
    advance(speculator, second, 3)
    advance(speculator, first, 4)
    assert drafter.calls == [[1, 2], [3], [1, 2, 4]]


def test_expected_drafts_are_as_many_as_the_right_ones() -> None:
    """With a drafter whose shares are wrong: after a while, chances add up to the accepted drafts."""
    dice = Random(8)
    drafter = Planned("prompt", sure(1, 1, 1, share=0.95))
    speculator = speculating([drafter], 3)
    expected = accepted = 0.0
    for name in range(60):
        seq = sequence(str(name))
        speculator.add(seq, INPUTS)
        advance(speculator, seq, 1)
        for _ in range(20):
            right = 0
            while right < 3 and dice.random() < 0.6:
                right += 1
            drafts = propose(speculator, seq, *(new := [1] * right + [2] * (right < 3)))
            seq.append(new)
            if name >= 30:
                expected += sum(drafts.chances)
                accepted += min(right, len(drafts.tokens))
        speculator.remove(seq)
    assert expected == pytest.approx(accepted, rel=0.1)


class Computing(Planned):
    """A computed drafter, which is asked for several sequences at once. asked: their ids, for each call."""

    def __init__(self, name: str, found: Continuation) -> None:
        super().__init__(name, found)
        self.asked: list[list[str]] = []
        self.resting = False

    def draft(self, asked: Seq[DraftRequest], most: int) -> dict[str, Continuation]:  # type: ignore[override]
        self.asked.append([each.seq.id for each in asked])
        tokens, shares, _ = self.found
        return {each.seq.id: Continuation([*tokens], [*shares], 0) for each in asked}


def test_a_computed_drafter_is_asked_where_texts_have_little() -> None:
    """Those for which it was asked get the better of both."""
    text, layer = Planned("prompt", sure(1, 2, 3)), Computing("layer", sure(7, 8, share=0.9))
    budget, good, poor = DraftBudget(StepTimes()), sequence("good"), sequence("poor")
    speculator = Speculator([text], 5, budget)
    speculator.use(layer)
    for seq in (good, poor):
        speculator.add(seq, INPUTS)
    assert propose(speculator, good, 1).drafter == "prompt"
    text.found = NOTHING
    assert propose(speculator, poor, 1)._replace(chances=()) == Drafts([7, 8], (), 0, "layer")
    text.found = sure(5, share=0.3)
    assert propose(speculator, poor, 1).drafter == "layer"
    assert [names for names in layer.asked if names] == [["poor"], ["poor"]]
    speculator.remove(good)
    speculator.remove(poor)
    assert not layer.known


def test_a_computed_drafter_that_takes_longer_than_it_saves_is_left_out_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(speculators, "time", SimpleNamespace(perf_counter=lambda: now))

    class Slow(Computing):
        def draft(self, asked: Seq[DraftRequest], most: int) -> dict[str, Continuation]:  # type: ignore[override]
            nonlocal now
            now += 1.0
            return super().draft(asked, most)

    step_s = 0.02
    budget, layer = DraftBudget(StepTimes()), Slow("layer", sure(7))
    monkeypatch.setattr(budget, "seconds", lambda rows, context: step_s)
    speculator, seq = Speculator([], 5, budget), sequence()
    speculator.use(layer)
    speculator.add(seq, INPUTS)
    drafts = NO_DRAFTS

    def steps(count: int) -> int:
        """Let every draft be right. Returns how often the drafter was asked."""
        nonlocal drafts
        before = len(layer.asked)
        for _ in range(count):
            drafts = advance(speculator, seq, *([7, 7] if drafts.tokens else [7]))
        return len(layer.asked) - before

    assert steps(600) == 2, "its second drafts told that they do not pay, and then it rests"
    assert layer.resting
    step_s = 10.0
    steps(REST + REFUSALS)
    assert steps(20) == 20, "it is worth its time now"
