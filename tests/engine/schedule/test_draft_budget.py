"""How many drafts a step computes: compared with every choice there is, by known durations of steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.core.sampling import SamplingParams
from fovea.engine.schedule.draft_budget import (
    FIRST_PAUSE,
    LEAST_GAIN,
    MOST_EXCESS,
    SIZES,
    TRIAL,
    DraftBudget,
    Use,
)
from fovea.engine.schedule.step_times import StepTimes
from fovea.engine.sequence import Drafts, Sequence
from fovea.planner.cost import Composition

ROWS = 40
CHANCES = st.lists(st.floats(0.1, 1), max_size=4).map(lambda chances: sorted(chances, reverse=True))


class KnownTimes(StepTimes):
    """Durations that a test knows, by the number of rows."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__()
        self.by_rows = seconds

    @property
    def measured(self) -> bool:
        return True

    def seconds(self, composition: Composition) -> float:
        return self.by_rows(composition.decodes)


def budget(seconds: Callable[[int], float]) -> DraftBudget:
    found = DraftBudget(KnownTimes(seconds))
    found.drafters = True
    return found


def decoding(*chances: float, forced: int = 0, name: str = "a", drafter: str = "prompt") -> Sequence:
    """A sequence that decodes and has drafts, of which the first ones are forced."""
    seq = Sequence(name, [1, 2, 3], SamplingParams(), 999)
    seq.append([4])
    seq.computed_tokens = 3
    count = forced + len(chances)
    seq.expect(Drafts(list(range(count)), [1.0] * forced + list(chances), forced, drafter))
    return seq


def sequences(offers: Seq[Seq[float]], forced: Seq[int] = ()) -> list[Sequence]:
    forced = [*forced, *[0] * len(offers)]
    return [decoding(*each, forced=forced[i], name=f"s{i}") for i, each in enumerate(offers)]


def rate(times: Seq[float], offers: Seq[Seq[float]], counts: Seq[int], before: int) -> float:
    """Expected tokens per second of a choice. before: rows that are computed in any case."""
    expected = before + sum(sum(each[:count]) for each, count in zip(offers, counts, strict=True))
    return expected / times[before + sum(counts)]


@given(
    offers=st.lists(CHANCES, min_size=1, max_size=4),
    forced=st.lists(st.integers(0, 3), max_size=4),
    times=st.lists(st.floats(0.1, 10), min_size=ROWS, max_size=ROWS),
)
def test_no_choice_of_drafts_has_more_tokens_per_second(
    offers: list[list[float]], forced: list[int], times: list[float]
) -> None:
    """Whatever rows cost. Drafts are only computed for a gain that is worth it."""
    seqs = sequences(offers, forced)
    before = sum(1 + seq.forced for seq in seqs)
    chooser = budget(times.__getitem__)
    chooser.choose(seqs)
    counts = [len(seq.drafts) - seq.forced for seq in seqs]
    every = product(*(range(len(each) + 1) for each in offers))
    best = max(rate(times, offers, each, before) for each in every)
    none = rate(times, offers, [0] * len(offers), before)
    mine = rate(times, offers, counts, before)
    if best > none * LEAST_GAIN * (1 + 1e-9):
        assert mine == pytest.approx(best)
    elif best < none * LEAST_GAIN * (1 - 1e-9):
        assert not any(counts)
    assert mine >= none
    assert chooser.left_out == sum(len(each) for each in offers) - sum(counts)
    for seq, each, number in zip(seqs, offers, [*forced, *[0] * len(offers)], strict=False):
        assert seq.forced == number, "forced drafts stay"
        assert seq.drafts == list(range(len(seq.drafts)))
        assert seq.chances == [1.0] * number + each[: len(seq.drafts) - number]


def test_the_most_likely_drafts_come_first() -> None:
    """There is room for three rows more: those of the answers that are most certain."""
    seqs = sequences([[0.9, 0.3], [0.5, 0.45, 0.4], [0.8, 0.7]])
    budget(lambda rows: 1.0 if rows <= 6 else 100.0).choose(seqs)
    assert [seq.chances for seq in seqs] == [[0.9], [], [0.8, 0.7]]


def test_no_draft_where_a_row_costs_as_much_as_a_step() -> None:
    seqs = sequences([[1.0, 1.0], [1.0]])
    chooser = budget(float)
    chooser.choose(seqs)
    assert not any(seq.drafts for seq in seqs)
    assert chooser.left_out == 3
    assert not chooser.worthwhile


def test_all_drafts_where_rows_cost_nothing() -> None:
    seqs = sequences([[0.2, 0.1], [0.1]])
    chooser = budget(lambda rows: 1.0)
    chooser.choose(seqs)
    assert [len(seq.drafts) for seq in seqs] == [2, 1]
    assert chooser.left_out == 0
    assert chooser.worthwhile


def test_forced_drafts_stay_whatever_they_cost_and_others_pay_for_themselves() -> None:
    seq = decoding(1.0, 1.0, forced=3)
    budget(float).choose([seq])
    assert seq.drafts == [0, 1, 2]
    assert seq.forced == 3


def test_sequences_that_do_not_decode_keep_their_drafts_and_do_not_count() -> None:
    prompt = decoding(0.5, name="b")
    prompt.computed_tokens = 1
    late = decoding(0.5, name="c")
    late.computed_tokens = late.length
    chooser = budget(float)
    chooser.choose([prompt, late])
    assert len(prompt.drafts) == len(late.drafts) == 1
    seq = decoding(1.0)
    budget({1: 1.0, 2: 1.5, 3: 9.0, 4: 9.0}.__getitem__).choose([prompt, seq, late])
    assert len(seq.drafts) == 1, "the two others have no rows"


def test_whether_drafts_are_worth_looking_for_is_known_without_drafts() -> None:
    cheap, dear = budget(lambda rows: 1 + 0.1 * rows), budget(float)
    for chooser, expected in ((cheap, True), (dear, False)):
        assert chooser.worthwhile, "nothing is known yet"
        chooser.choose([])
        assert chooser.worthwhile is expected, "for the answer that begins next"
        chooser.choose(sequences([[], []]))
        assert chooser.worthwhile is expected
    full = [decoding(name=str(i)) for i in range(32)]
    steps = budget(lambda rows: 1.0 if rows <= 32 else 2.0)
    steps.choose(full)
    assert not steps.worthwhile
    steps.choose(full[:16])
    assert steps.worthwhile, "the batch became smaller"


def test_before_a_measurement_proportions_decide() -> None:
    chooser = DraftBudget(StepTimes())
    chooser.drafters = True
    seq = decoding(0.9, 0.8)
    chooser.observe(Composition(2, 8), 1.0)  # nothing to compare it with
    chooser.choose([seq])
    assert len(seq.drafts) == 2
    assert chooser.seconds(4, 4.0) == chooser.times.seconds(Composition(4, 16))


def test_a_number_of_rows_that_was_slow_is_avoided_and_tried_again_later() -> None:
    """The prediction does not know that steps of three rows are slow."""
    chooser = budget(lambda rows: 1 + 0.01 * rows)

    def taken() -> int:
        seq = decoding(0.9, 0.8)
        chooser.choose([seq])
        return len(seq.drafts)

    assert taken() == 2
    for _ in range(60):
        chooser.observe(Composition(3, 12), 3.0)
        chooser.observe(Composition(2, 8), 1.02)
        chooser.observe(Composition(1, 4), 1.01)
    assert chooser.seconds(3, 4.0) > 1.5 * chooser.seconds(2, 4.0)
    assert taken() == 1
    steps = 0
    while taken() < 2:
        chooser.observe(Composition(2, 8), 1.02)
        steps += 1
        assert steps < 300
    assert steps > 10
    assert chooser.seconds(2, 4.0) == pytest.approx(1.02, rel=0.02)


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 64, 65, 256, 900])
def test_a_ratio_counts_for_its_number_of_rows_first_and_for_all_in_the_end(rows: int) -> None:
    chooser = budget(float)
    others = [size for size in SIZES if size < rows][-2:-1] + [size for size in SIZES if size > rows + 20][:1]
    for _ in range(10):
        chooser.observe(Composition(rows, rows), 0.5 * rows)
    assert chooser.seconds(rows, 1.0) < 0.7 * rows
    assert all(0.85 * other < chooser.seconds(other, 1.0) < other for other in others)
    for _ in range(300):
        chooser.observe(Composition(rows, rows), 0.5 * rows)
    assert chooser.seconds(rows, 1.0) == pytest.approx(0.5 * rows, rel=0.01)
    assert all(chooser.seconds(other, 1.0) == pytest.approx(0.5 * other, rel=0.05) for other in others)


def test_only_steps_that_do_nothing_but_decode_tell_the_cost_of_rows() -> None:
    chooser = budget(float)
    chooser.observe(Composition(3, 12, 64, 1, 9), 9.0)
    chooser.observe(Composition(0, 0, 64, 1, 9), 9.0)
    chooser.observe(Composition(), 9.0)
    assert chooser.seconds(3, 4.0) == 3.0


def test_the_time_of_drafting_is_no_cost_of_rows() -> None:
    """A layer's drafts took longer than a step, made tokens seem dear, and so seemed worthwhile."""
    chooser = budget(float)
    for _ in range(100):
        chooser.drafting_s = 5.0
        chooser.observe(Composition(3, 12), 8.0)
    assert chooser.seconds(3, 4.0) == pytest.approx(3.0)
    chooser.observe(Composition(3, 12), 3.0)
    assert chooser.seconds(3, 4.0) == pytest.approx(3.0), "the time counts for one step"


def test_one_stall_of_the_machine_hardly_counts() -> None:
    chooser = budget(float)
    chooser.observe(Composition(3, 12), 1e6)
    assert chooser.seconds(3, 4.0) < 3.5


@given(
    seconds=st.lists(st.floats(0.01, 100), min_size=20, max_size=20),
    counts=st.lists(st.integers(1, 20), max_size=60),
)
def test_ratios_stay_in_their_range(seconds: list[float], counts: list[int]) -> None:
    chooser = budget(float)
    for rows in counts:
        chooser.observe(Composition(rows, rows), seconds[rows - 1])
        assert 0 < chooser.seconds(rows, 1.0) <= rows * MOST_EXCESS


def test_speculation_that_loses_as_a_whole_pauses_for_ever_longer_times() -> None:
    """Looking for drafts took longer than the drafts saved, which no decision about one step could see."""
    chooser = budget(lambda rows: 1.0)

    def steps(seconds: float, tokens: int) -> int:
        """Return the number of steps in a row without speculation, after it was judged once."""
        for _ in range(TRIAL):
            chooser.drafting_s = 0.2
            chooser.observe(Composition(1, 4), seconds, Use(tokens, 1, 1))
        paused = 0
        while True:
            chooser.choose([decoding(0.9)])
            if chooser.worthwhile:
                return paused
            paused += 1

    assert steps(1.2, 1) == FIRST_PAUSE - 1
    assert steps(1.2, 1) == 2 * FIRST_PAUSE - 1
    assert steps(1.2, 2) == 0, "two tokens in a step are worth the time"
    assert steps(1.2, 1) == FIRST_PAUSE - 1


def test_a_careful_budget_looks_for_drafts_only_where_that_is_cheap() -> None:
    chooser = budget(lambda rows: 1.0)
    for careful, seconds, expected in ((True, 0.019, True), (True, 0.021, False), (False, 0.5, True)):
        chooser.careful = careful
        for _ in range(200):
            chooser.note_looking(seconds)
        chooser.choose([decoding(0.9)])
        assert chooser.worthwhile is expected
