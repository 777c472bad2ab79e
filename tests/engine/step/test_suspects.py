"""A sequence that makes steps fail is found and ends; the others get exactly their answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fovea.core.errors import EngineError
from fovea.engine.schedule.plan import StepPlan
from fovea.engine.step.loop import FATAL_FAILURES, PROBE, DeadDevice
from fovea.engine.step.stepper import FailureSearch, Step
from tests.support.brains import answer, scheduler, sequence
from tests.support.poison import SECRET, PoisonedLoop
from tests.support.thorough import examples

PIECES = st.one_of(st.integers(0, 3), st.tuples(st.sampled_from(["cat", "dog"]), st.integers(1, 4)))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, "fovea.engine"):
        yield


def guilty_in(plan: StepPlan, names: set[str]) -> bool:
    return any(item.seq.id in names for item in plan.work)


def test_one_guilty_sequence_among_many_is_found_in_few_steps() -> None:
    suspects, names, fails = FailureSearch(), [f"s{i:02}" for i in range(64)], 0
    group, steps = frozenset(names), 0
    while True:
        steps += 1
        if "s63" not in group:
            suspects.clear(group)
        else:
            fails += 1
            blamed = suspects.fail(sorted(group))
            if blamed is not None:
                break
        assert suspects.group is not None
        group = suspects.group
    assert (blamed, fails, steps) == ("s63", 7, 13)
    assert suspects.group is None


def test_a_group_ends_when_none_of_its_sequences_can_be_in_a_step() -> None:
    suspects = FailureSearch()
    assert suspects.fail(["a", "b", "c", "d"]) is None
    assert suspects.group == {"a", "b"}
    suspects.clear({"a"})
    assert suspects.group == {"b"}, "b was not in the step that succeeded"
    suspects.clear(())
    assert suspects.group == {"c", "d"}
    assert suspects.fail([]) is None
    assert suspects.group is None
    suspects.clear({"x"})
    assert suspects.fail(["x"]) == "x"


@settings(max_examples=examples(150), deadline=None)
@given(
    prompts=st.lists(st.lists(PIECES, min_size=1, max_size=8), min_size=1, max_size=9),
    guilty=st.sets(st.integers(0, 8), max_size=3),
    late=st.booleans(),
    alone=st.sets(st.integers(0, 8), max_size=2),
    blocks=st.integers(14, 40),
    step=st.integers(2, 20),
    running=st.integers(1, 9),
    host=st.sampled_from([0, 6]),
    embed=st.sampled_from([0, 10, 1000]),
    unlucky=st.sets(st.integers(1, 30)),
)
def test_the_guilty_end_and_the_innocent_get_their_answers(
    prompts: list[Any],
    guilty: set[int],
    late: bool,
    alone: set[int],
    blocks: int,
    step: int,
    running: int,
    host: int,
    embed: int,
    unlucky: set[int],
) -> None:
    """A step that failed ended all of its sequences: one poisoned request took 63 others with it.

    late: the poisoned sequences make only those steps fail that compute tokens of their answers.
    alone: numbers of sequences that fail by themselves when a token is chosen.
    unlucky: numbers of steps that fail for no reason, if they have several sequences.
    """
    poisoned, failing = {f"s{i}:0" for i in guilty}, {f"s{i}:0" for i in alone}

    def fails(plan: StepPlan) -> bool:
        if engine.executor.steps in unlucky and len(Step(plan).involved) > 1:
            return True
        return any(item.seq.id in poisoned and (item.seq.output_ids or not late) for item in plan.work)

    brain = scheduler(
        blocks=blocks,
        block_size=2,
        host_slots=host,
        embed_bytes=embed,
        max_step_tokens=step,
        max_running=running,
    )
    engine = PoisonedLoop(brain, fails, lambda seq: seq.id in failing)
    sequences = [
        sequence(f"s{i}:0", prompt, arrival=i // 2, max_tokens=4) for i, prompt in enumerate(prompts)
    ]
    sequences = [seq for seq in sequences if len(seq.prompt_ids) + 4 <= 2 * blocks]
    engine.add(*sequences)
    engine.run()
    for seq in sequences:
        error = engine.error(seq.id)
        if seq.id in poisoned | failing:
            assert isinstance(error, EngineError)
            assert SECRET not in str(error)
        else:
            assert error is None
            assert seq.output_ids == answer(seq)
    assert engine.loop.stepper.failure_search.group is None or not brain.running
    assert brain.kv.pool.used == 0


def test_no_number_of_poisoned_requests_ends_the_engine() -> None:
    """Ten requests, each of which made its own step fail, ended the engine for everybody."""
    engine = PoisonedLoop(scheduler(), lambda plan: guilty_in(plan, {f"bad{i}:0" for i in range(60)}))
    for i in range(30):
        engine.add(sequence(f"bad{i}:0", 4, arrival=float(i)))
        engine.run()
    engine.add(*(sequence(f"bad{i}:0", 4, arrival=float(i)) for i in range(30, 60)))
    engine.run()
    assert all(isinstance(engine.error(f"bad{i}:0"), EngineError) for i in range(60))
    good = sequence("good:0", 9)
    engine.add(good)
    engine.run()
    assert good.output_ids == answer(good)
    assert engine.loop.board.generated_tokens > 4, "a probe had to tell these requests from a dead device"


def test_ten_requests_that_fail_by_themselves_end_nothing() -> None:
    engine = PoisonedLoop(scheduler(), fails_alone=lambda seq: seq.id != PROBE)
    for i in range(3 * FATAL_FAILURES):
        engine.add(sequence(f"bad{i}:0", 4))
        engine.run()
        assert isinstance(engine.error(f"bad{i}:0"), EngineError)


def test_sequences_that_fail_only_together_all_get_their_answers() -> None:
    """A step may be too large for the memory of the device. Its halves are not."""
    engine = PoisonedLoop(scheduler(), lambda plan: len(plan.work) > 2)
    sequences = [sequence(f"s{i}:0", [i, 1, 2, 3], arrival=float(i)) for i in range(8)]
    engine.add(*sequences)
    engine.run()
    assert [seq.output_ids for seq in sequences] == [answer(seq) for seq in sequences]


def one_after_the_other(engine: PoisonedLoop) -> None:
    engine.run()
    for i in range(FATAL_FAILURES + 1):
        engine.add(sequence(f"late{i}:0", 4))
        engine.run()


@pytest.mark.parametrize("count", [1, 7, 40])
def test_a_dead_device_ends_the_loop_soon(count: int) -> None:
    engine = PoisonedLoop(scheduler(blocks=400), lambda plan: True)
    engine.add(*(sequence(f"s{i}:0", [i, 1, 2], arrival=float(i)) for i in range(count)))
    with pytest.raises(DeadDevice):
        one_after_the_other(engine)
    assert engine.executor.steps <= 2 * FATAL_FAILURES


def test_a_device_on_which_no_token_can_be_chosen_is_dead() -> None:
    engine = PoisonedLoop(scheduler(), fails_alone=lambda seq: True)
    with pytest.raises(DeadDevice):
        one_after_the_other(engine)


def test_a_probe_that_finds_no_room_waits_until_there_is_some() -> None:
    """A device that is dead is also noticed when every place is taken by sequences that wait."""
    engine = PoisonedLoop(scheduler(blocks=8, max_running=4), lambda plan: True)
    engine.add(*(sequence(f"s{i}:0", [i, 1, 2, 3, 4, 5], arrival=float(i)) for i in range(40)))
    with pytest.raises(DeadDevice):
        engine.run()
    assert engine.executor.steps < 40


def test_a_sequence_whose_moves_were_lost_starts_again() -> None:
    """Blocks that a failed step should have loaded hold nothing, so their tokens are computed again."""
    lost: list[str] = []

    def fails(plan: StepPlan) -> bool:
        owners = [move.owner for move in plan.moves if move.owner]
        lost.extend([] if lost else owners)
        return lost == owners != []

    engine = PoisonedLoop(scheduler(blocks=8, host_slots=8, embed_bytes=0), fails)
    cat: list[int | tuple[str, int]] = [1, ("cat", 10), 2]
    for name, prompt in (("cat:0", cat), ("text:0", list(range(100, 124)))):
        engine.add(sequence(name, prompt, max_tokens=2))
        engine.run()
    both = [sequence("again:0", [1, ("cat", 10), 3], max_tokens=2), sequence("other:0", [7, 8], max_tokens=2)]
    engine.add(*both)
    engine.run()
    assert (lost[0], engine.loop.failed_steps) == ("again:0", 1)
    assert [seq.output_ids for seq in both] == [answer(seq) for seq in both]
    assert both[0].preemptions == 1
