"""Tests of the online fit of costs, on machines with known costs."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fovea.engine.schedule.step_times import OnlineFit
from tests.support.thorough import examples


def amounts(rng: random.Random) -> tuple[float, ...]:
    """Amounts of a step: decodes with their context, and at times a prompt."""
    decodes = rng.randrange(1, 32)
    prompt = rng.choice([0, 0, 0, rng.randrange(16, 400)])
    return 1, decodes, decodes * rng.randrange(50, 1000), prompt, prompt > 0, prompt * rng.randrange(1, 500)


TRUE = (0.01, 0.001, 2e-6, 3e-4, 0.004, 2e-7)


def seconds(of: tuple[float, ...], costs: tuple[float, ...] = TRUE) -> float:
    return sum(a * c for a, c in zip(of, costs, strict=True))


@settings(deadline=None, max_examples=examples(20))
@given(noise=st.sampled_from([0.0, 0.1, 0.25]), seed=st.integers(0, 99), scale=st.floats(1e-3, 10))
def test_predictions_come_near_the_truth_whatever_the_speed_of_the_machine(
    noise: float, seed: int, scale: float
) -> None:
    rng = random.Random(seed)
    costs = tuple(scale * cost for cost in TRUE)
    fit = OnlineFit((10, 2, 0.01, 1, 10, 0.001))
    for _ in range(600):
        of = amounts(rng)
        fit.observe(of, seconds(of, costs) * rng.lognormvariate(0, noise))
    errors = [abs(fit.predict(of) / seconds(of, costs) - 1) for of in (amounts(rng) for _ in range(50))]
    assert sorted(errors)[45] < 0.05 + noise / 2


def test_the_fit_agrees_with_least_squares_of_all_measurements() -> None:
    rng = random.Random(3)
    fit = OnlineFit((10, 2, 0.01, 1, 10, 0.001), memory=10**6)
    rows, measured = [], []
    for _ in range(2000):
        of = amounts(rng)
        rows.append(of)
        measured.append(seconds(of) * rng.uniform(0.9, 1.1))
        fit.observe(of, measured[-1])
    scaled = np.array(rows) / np.array(measured)[:, None]
    best, *_ = np.linalg.lstsq(scaled, np.ones(len(rows)), rcond=None)
    for of in rows[:100]:
        assert fit.predict(of) == pytest.approx(float(np.dot(best, of)), rel=0.03)


def test_one_stall_of_the_machine_changes_little() -> None:
    rng = random.Random(5)
    fit = OnlineFit((10, 2, 0.01, 1, 10, 0.001))
    for _ in range(300):
        of = amounts(rng)
        fit.observe(of, seconds(of))
    before = fit.predict((1, 8, 4000, 0, 0, 0))
    fit.observe((1, 8, 4000, 0, 0, 0), 60.0)
    assert fit.predict((1, 8, 4000, 0, 0, 0)) == pytest.approx(before, rel=0.03)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    rng = random.Random(6)
    fit = OnlineFit((10, 2, 0.01, 1, 10, 0.001), memory=100)
    for factor in (1, 5):
        for _ in range(500):
            of = amounts(rng)
            fit.observe(of, factor * seconds(of))
    assert fit.predict((1, 8, 4000, 100, 1, 5000)) == pytest.approx(
        5 * seconds((1, 8, 4000, 100, 1, 5000)), rel=0.2
    )


def test_costs_that_measurements_do_not_show_stay() -> None:
    """Thousands of steps that only decode must not forget the cost of prompts."""
    rng = random.Random(7)
    fit = OnlineFit((10, 2, 0.01, 1, 10, 0.001))
    for _ in range(400):
        of = amounts(rng)
        fit.observe(of, seconds(of))
    known = fit.costs[3:]
    for _ in range(5000):
        fit.observe((1, 8, 4000, 0, 0, 0), seconds((1, 8, 4000, 0, 0, 0)))
    assert fit.costs[3:] == known
    assert fit.predict((1, 8, 4000, 200, 1, 9000)) == pytest.approx(
        seconds((1, 8, 4000, 200, 1, 9000)), rel=0.1
    )


def test_no_cost_is_negative_and_no_measurement_fails() -> None:
    rng = random.Random(8)
    fit = OnlineFit((1, 1, 1))
    for _ in range(3000):
        fit.observe((1, rng.randrange(9), rng.randrange(9)), rng.choice([0.0, 1e-12, 1e-3, 1.0, 1e6]))
        assert min(fit.costs) >= 0
        assert fit.predict((1, 1, 1)) < 1e9


def test_the_first_measurement_sets_the_scale() -> None:
    fit = OnlineFit((10, 2, 1))
    assert not fit.measured
    fit.observe((1, 0, 90), 0.1)
    assert fit.measured
    assert fit.predict((1, 0, 90)) == pytest.approx(0.1)
    assert fit.costs == pytest.approx([0.01, 0.002, 0.001])
