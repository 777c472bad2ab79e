"""Tests of the factor from expected to bounded durations."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.engine.schedule.itl_limit import LOWEST, LateSteps
from fovea.engine.schedule.step_times import Margin


@given(percentile=st.sampled_from([50, 80, 95]), spread=st.floats(0.01, 1), seed=st.integers(0, 9))
def test_the_percentage_of_later_durations_keeps_the_bound(percentile: int, spread: float, seed: int) -> None:
    rng = random.Random(seed)
    margin, within = Margin(percentile), 0
    for _ in range(2000):
        seconds = rng.lognormvariate(0, spread)
        within += seconds <= margin.factor
        margin.observe(1.0, seconds)
    assert within / 2000 == pytest.approx(percentile / 100, abs=0.025)


def test_a_slower_machine_counts_within_a_twentieth_of_the_window() -> None:
    margin = Margin(95, window=100)
    for _ in range(100):
        margin.observe(1.0, 1.0)
    for _ in range(6):
        margin.observe(1.0, 3.0)
    assert margin.factor == 3.0


def test_a_few_stalls_do_not_count() -> None:
    margin = Margin(95, window=100)
    for number in range(100):
        margin.observe(0.01, 5.0 if number % 25 == 0 else 0.011)
    assert margin.factor == pytest.approx(1.1)


def test_while_few_the_largest_counts_and_before_the_first_the_given_one() -> None:
    margin = Margin(95, first=1.25)
    assert margin.factor == 1.25
    margin.observe(0.0, 1.0)
    assert margin.factor == 1.25, "there is no ratio to a prediction of 0"
    for ratio in (1.0, 1.4, 0.9):
        margin.observe(1.0, ratio)
    assert margin.factor == 1.4


def test_the_factor_can_be_read_while_another_thread_observes() -> None:
    margin = Margin(99.9, window=2)
    for ratio in (1.0, 2.0):
        margin.observe(1.0, ratio)
    margin._sorted.pop()  # as `observe` does before it adds the new ratio
    assert margin.factor == 2.0


@given(ratios=st.lists(st.floats(0.1, 10), min_size=1, max_size=60))
def test_the_window_holds_the_latest_ratios(ratios: list[float]) -> None:
    margin = Margin(50, window=8)
    for ratio in ratios:
        margin.observe(1.0, ratio)
    latest = sorted(ratios[-8:])
    assert margin.factor == latest[min(len(latest), -(-(len(latest) + 1) // 2)) - 1]


def test_a_late_step_is_earned_by_many_that_are_in_time() -> None:
    late = LateSteps(95)
    for _ in range(19):
        late.observe(False)
        assert not late.may_be_late
    for _ in range(100):
        late.observe(False)
    assert late.may_be_late
    late.observe(True)
    assert not late.may_be_late, "only one is saved up"
    assert (late.steps, late.late) == (120, 1)


def test_a_bad_minute_is_forgiven() -> None:
    late = LateSteps(95)
    for _ in range(1000):
        late.observe(True)
    for _ in range(int((1 - LOWEST) / 0.05) + 1):
        late.observe(False)
    assert late.may_be_late
