"""An executor in real time, on a clock of its own: steps last as long as they cost, and no longer."""

from __future__ import annotations

from typing import Any

import pytest

from fovea.core.settings import settings_of
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.config import EngineConfig
from fovea.engine.job import SequenceInputs
from fovea.engine.schedule.plan import StepPlan, Work
from fovea.engine.sequence import Sequence
from fovea.engine.simulate import executor as realtime
from fovea.engine.simulate.assemble import SERVER_SETTINGS, TRACE_SETTINGS, not_simulated
from fovea.engine.simulate.executor import LAG_S, CostExecutor, Filler, RealtimeExecutor
from fovea.planner.cost import CostModel
from tests.support.brains import sequence

COST = CostModel(step_s=0.02, decode_s=0, context_s=0, token_s=0, chunk_s=0, pair_s=0, between_s=0.001)


class Clock:
    """Stands in for the module `time`: sleeping moves the clock, and nothing else does but the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.naps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


class Words:
    """A tokenizer whose tokens are words, but for the end."""

    vocab_size = 20
    eos_ids = frozenset({0})

    def decode(self, ids: list[int]) -> str:
        return " word" if ids[0] > 3 else "?"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(realtime, "time", clock)
    return clock


@pytest.fixture
def executor(clock: Clock) -> RealtimeExecutor:
    tokenizer: Any = Words()
    filler = Filler(tokenizer)
    return RealtimeExecutor(CostExecutor(COST, EmbeddingCache(1000), filler.token), filler)


def plan(seq: Sequence) -> StepPlan:
    return StepPlan((Work(seq, 0, 8),))


def test_a_step_lasts_as_long_as_it_costs(executor: RealtimeExecutor, clock: Clock) -> None:
    seq = sequence("a", 8)
    executor.add(seq, SequenceInputs())
    result = executor.execute(plan(seq), 0.0)
    assert result.seconds == 0.02
    assert clock.naps == [pytest.approx(0.021)]
    assert list(result.sampled) == ["a"]


def test_what_python_takes_between_steps_is_caught_up_with(executor: RealtimeExecutor, clock: Clock) -> None:
    seq = sequence("a", 8)
    executor.add(seq, SequenceInputs())
    executor.execute(plan(seq), 0.0)
    clock.now += 0.005
    executor.execute(plan(seq), 0.0)
    assert clock.naps[1] == pytest.approx(0.016)


def test_a_long_pause_is_not(executor: RealtimeExecutor, clock: Clock) -> None:
    """A machine that was busy for a second would otherwise run a second's steps at once."""
    seq = sequence("a", 8)
    executor.add(seq, SequenceInputs())
    executor.execute(plan(seq), 0.0)
    clock.now += 1.0
    for _ in range(5):
        executor.execute(plan(seq), 0.0)
    assert sum(clock.naps[1:]) == pytest.approx(5 * 0.021 - LAG_S)


def test_an_idle_engine_has_nothing_to_catch_up_with(executor: RealtimeExecutor, clock: Clock) -> None:
    """The first step after a pause was shorter by as much as may be caught up with."""
    clock.now += 60.0
    seq = sequence("a", 8)
    executor.add(seq, SequenceInputs())
    executor.execute(plan(seq), 0.0)
    assert clock.naps == [pytest.approx(0.021)]


def test_a_sequence_that_is_removed_leaves_nothing(executor: RealtimeExecutor) -> None:
    seq = sequence("a", 8)
    executor.add(seq, SequenceInputs())
    executor.remove(seq)
    executor.remove(seq)
    assert len(executor._filler) == 0
    assert not executor.encoding


def test_settings_that_are_simulated_are_settings() -> None:
    names = {entry.name for entry in settings_of(EngineConfig)}
    assert TRACE_SETTINGS < SERVER_SETTINGS < names
    assert set(not_simulated(TRACE_SETTINGS)) == names - TRACE_SETTINGS
    assert "quantization" in not_simulated(SERVER_SETTINGS)
