"""A step that does not fit into the device's memory becomes smaller. It ends no request that fits alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fovea.core.errors import OutOfMemory
from fovea.engine.schedule.itl_limit import FEWEST_TOKENS
from fovea.engine.schedule.plan import StepPlan
from fovea.engine.step.loop import FATAL_FAILURES, DeadDevice
from fovea.engine.step.stepper import GROW_AFTER, MemoryLimit, Step
from tests.support.brains import answer, scheduler, sequence
from tests.support.poison import SECRET, PoisonedLoop
from tests.support.thorough import examples

PIECES = st.one_of(st.integers(0, 3), st.tuples(st.sampled_from(["cat", "dog"]), st.integers(1, 4)))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, "fovea.engine"):
        yield


@settings(max_examples=examples(150), deadline=None)
@given(
    prompts=st.lists(st.lists(PIECES, min_size=1, max_size=8), min_size=1, max_size=9),
    large=st.sets(st.integers(0, 8), max_size=2),
    room=st.integers(3, 24),
    blocks=st.integers(14, 40),
    step=st.integers(2, 20),
    running=st.integers(1, 9),
    host=st.sampled_from([0, 6]),
    shortages=st.sets(st.integers(1, 60)),
)
def test_only_requests_that_do_not_fit_alone_end_and_no_answer_changes(
    prompts: list[Any],
    large: set[int],
    room: int,
    blocks: int,
    step: int,
    running: int,
    host: int,
    shortages: set[int],
) -> None:
    """Such a step was halved until one sequence was left, and this one ended, whether it was large or not.

    large: numbers of sequences that fit into no step. room: units of memory; a token and a sequence take one.
    shortages: numbers of steps in which another process has the memory, unless these are as small as can be.
    """
    too_large = {f"s{i}:0" for i in large}

    def overflows(plan: StepPlan) -> bool:
        several = plan.tokens > FEWEST_TOKENS or len(Step(plan).involved) > 1
        if several and engine.executor.steps in shortages:
            return True
        return plan.tokens + len(plan.work) > room or any(item.seq.id in too_large for item in plan.work)

    brain = scheduler(blocks=blocks, block_size=2, host_slots=host, max_step_tokens=step, max_running=running)
    engine = PoisonedLoop(brain, overflows=overflows)
    sequences = [
        sequence(f"s{i}:0", prompt, arrival=i // 2, max_tokens=4) for i, prompt in enumerate(prompts)
    ]
    sequences = [seq for seq in sequences if len(seq.prompt_ids) + 4 <= 2 * blocks]
    engine.add(*sequences)
    engine.run(6000)
    enough = room > FEWEST_TOKENS
    for seq in sequences:
        error = engine.error(seq.id)
        if seq.id in too_large:
            assert isinstance(error, OutOfMemory)
            assert "memory" in str(error)
            assert SECRET not in str(error)
        elif error is None:
            assert seq.output_ids == answer(seq)
        else:
            assert not enough, "it fits alone"
            assert isinstance(error, OutOfMemory)
    ended = sum(engine.error(seq.id) is not None for seq in sequences)
    assert engine.loop.stepper.memory.failures == ended
    assert engine.loop.failed_steps == 0
    assert brain.kv.pool.used == 0


def test_a_batch_that_does_not_fit_continues_in_turns_and_grows_again() -> None:
    """Memory for four decodes is left. Eight sequences take turns, and all get on at the same pace."""
    room = 4
    engine = PoisonedLoop(scheduler(max_step_tokens=64), overflows=lambda plan: len(plan.work) > room)
    sequences = [sequence(f"s{i}:0", [i], arrival=float(i), max_tokens=12) for i in range(8)]
    engine.add(*sequences)
    limits = []
    for _ in range(20):
        engine.loop._step()
        limits.append(engine.loop.stepper.memory.tokens)
        lengths = [len(seq.output_ids) for seq in sequences]
    assert limits[0] == 4
    assert max(lengths) - min(lengths) <= 2, "the last ones wait until the first ones have ended"
    engine.run()
    assert [seq.output_ids for seq in sequences] == [answer(seq) for seq in sequences]
    stats = engine.loop.stepper.control_stats()
    assert stats["memory_retries"] >= 1
    assert stats["memory_failures"] == 0
    room = 64
    for number in range(60):
        engine.add(sequence(f"more{number}:0", [number], arrival=9.0, max_tokens=12))
        engine.run()
    assert engine.loop.stepper.control_stats()["step_tokens_allowed"] == 64


def test_the_limit_halves_at_once_and_grows_by_a_quarter() -> None:
    limit = MemoryLimit(2048)
    assert limit.shrink(2000, ["a", "b"], searching=False)
    assert limit.tokens == 1000
    assert limit.shrink(300, ["a", "b"], searching=True)
    assert limit.tokens == 150
    for _ in range(GROW_AFTER - 1):
        limit.succeed()
    assert limit.tokens == 150
    limit.succeed()
    assert limit.tokens == 187
    for _ in range(20 * GROW_AFTER):
        limit.succeed()
    assert limit.tokens == 2048


def test_a_request_that_is_too_large_leaves_the_others_their_steps() -> None:
    """After it has ended, the limit is as high as before, since only this request did not fit."""
    brain = scheduler(max_step_tokens=128, blocks=200)
    engine = PoisonedLoop(brain, overflows=lambda plan: any(item.seq.id == "bad:0" for item in plan.work))
    sequences = [sequence(f"s{i}:0", list(range(i, i + 9)), arrival=float(i)) for i in range(6)]
    engine.add(*sequences, sequence("bad:0", list(range(200, 240)), arrival=2.5))
    engine.run()
    assert isinstance(engine.error("bad:0"), OutOfMemory)
    assert [seq.output_ids for seq in sequences] == [answer(seq) for seq in sequences]
    assert engine.loop.stepper.memory.tokens == 128


def test_a_device_without_any_memory_is_dead() -> None:
    engine = PoisonedLoop(scheduler(), overflows=lambda plan: True)
    engine.add(*(sequence(f"s{i}:0", 4, arrival=float(i)) for i in range(FATAL_FAILURES + 1)))
    with pytest.raises(DeadDevice):
        engine.run()
