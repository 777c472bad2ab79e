"""Tests of the bound on running sequences that keeps gaps within a target, on simulated machines."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fovea.engine.schedule.itl_limit import DecodeBound
from fovea.engine.schedule.step_times import StepTimes
from fovea.engine.sequence import Sequence
from fovea.planner.cost import Composition
from tests.support.brains import sequence
from tests.support.thorough import examples


def times(fixed_s: float, each_s: float, context_s: float = 0.0) -> StepTimes:
    """Predictions that were trained on a machine on which n decodes take fixed_s + n * each_s seconds."""
    trained = StepTimes(95)
    for _ in range(60):
        for decodes in (1, 2, 5, 17, 40):
            for context in (50, 400):
                step = Composition(decodes, decodes * context)
                trained.observe(step, fixed_s + decodes * (each_s + context * context_s))
    return trained


def running(count: int, prompt: int = 100, max_tokens: int = 2) -> list[Sequence]:
    return [sequence(str(number), prompt, max_tokens=max_tokens) for number in range(count)]


@settings(deadline=None, max_examples=examples(15))
@given(
    fixed_s=st.floats(0.001, 0.02),
    each_s=st.floats(0.0002, 0.02),
    target_s=st.floats(0.03, 0.1),
    beside_s=st.sampled_from([0.0, 0.005]),
)
def test_as_many_run_as_keep_the_target_with_time_for_the_smallest_chunk(
    fixed_s: float, each_s: float, target_s: float, beside_s: float
) -> None:
    bound = DecodeBound(target_s, 64, times(fixed_s, each_s))
    allowed = bound.allowed(running(3), running(5), beside_s)
    assert allowed == 1 or fixed_s + (allowed - 0.5) * each_s + beside_s <= target_s * 1.05
    assert allowed == 64 or fixed_s + (allowed + 1.5) * each_s + beside_s > target_s * 0.95


def test_the_growth_of_contexts_counts_before_it_happens() -> None:
    bound = DecodeBound(0.05, 64, times(0.01, 0.0001, context_s=2e-5))
    short = bound.allowed(running(4), running(4), 0.0)
    growing = bound.allowed(running(4, max_tokens=1000), running(4, max_tokens=1000), 0.0)
    assert growing < short


def test_long_prompts_in_the_queue_take_more_room() -> None:
    bound = DecodeBound(0.05, 64, times(0.01, 0.0001, context_s=2e-5))
    assert bound.allowed(running(4), running(4, prompt=1500), 0.0) < bound.allowed(
        running(4), running(4), 0.0
    )


def test_a_chunk_that_never_fits_takes_no_room() -> None:
    bound = DecodeBound(0.05, 64, times(0.01, 0.002))
    assert bound.allowed(running(4), (), 1.0) == bound.allowed(running(4), (), 0.0)


def test_at_least_one_sequence_may_run() -> None:
    assert DecodeBound(0.05, 8, times(0.045, 0.04)).allowed(running(5), (), 0.0) >= 1


@pytest.mark.parametrize("target_s", [0.0, 0.001])
def test_without_a_target_or_with_one_that_cannot_hold_there_is_no_bound(target_s: float) -> None:
    assert DecodeBound(target_s, 8, times(0.01, 0.01)).allowed(running(5), (), 0.0) == 8


def test_before_the_first_measurement_there_is_no_bound() -> None:
    assert DecodeBound(0.05, 8, StepTimes()).allowed(running(5), (), 0.0) == 8
