"""If both arms are the same, a look after every 50 requests hardly ever finds a difference."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gateway.experiments import support  # makes the simulation of benchmarks/gateway importable

# isort: split
from experiments import EXPERIMENT, Arm, doubtful_runs, equal_arms, falsehoods

from fovea.gateway.experiments.verdict import verdict

assert support.OLD.name == "old"


@pytest.mark.parametrize("runs", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_at_most_5_percent_of_all_runs_have_a_false_statement_at_any_look(runs: int) -> None:
    found = equal_arms(runs=runs, requests=2000, every=50, seed=0)
    assert found["looks"] == 40
    assert found["false_share"] <= 0.05, found["false_by_statement"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_at_most_5_percent_of_longer_runs_have_a_false_statement(seed: int) -> None:
    found = equal_arms(runs=2000, requests=20_000, every=100, seed=seed)
    assert found["false_share"] <= 0.05, found["false_by_statement"]


def test_runs_without_suspicion_have_no_false_statement() -> None:
    """The simulation computes intervals of doubtful runs only. Here they are computed for others, too."""
    rng = np.random.default_rng(5)
    old, new = Arm(40), Arm(40)
    for count in (25, 300):
        old.add(rng, count)
        new.add(rng, count)
        others = sorted(set(range(40)) - set(doubtful_runs(old, new).tolist()))
        assert len(others) > 30
        for run in others:
            assert falsehoods(verdict(EXPERIMENT, "new", old.statistics(run), new.statistics(run))) == []


def test_arms_that_differ_are_doubtful() -> None:
    """Each kind of difference is seen, so the count of false statements could be above 0."""
    rng = np.random.default_rng(5)
    for name in ("times", "rated", "costs", "errors"):
        old, new = Arm(3), Arm(3)
        old.add(rng, 3000)
        new.add(rng, 3000)
        if name == "errors":
            new.errors += 100
        else:
            setattr(
                new, name, np.roll(getattr(new, name), {"times": 30, "rated": 1, "costs": 4}[name], axis=1)
            )
        assert len(doubtful_runs(old, new)) == 3
        wrong = falsehoods(verdict(EXPERIMENT, "new", old.statistics(0), new.statistics(0)))
        assert wrong, name


def test_an_interval_for_one_look_would_be_wrong_far_more_often() -> None:
    """A plain test at the same looks finds false differences in more runs than alpha allows.

    This shows that the looks of the simulation are many enough to tempt.
    """
    rng = np.random.default_rng(0)
    failed = rng.random((2000, 2, 40, 25)) < 0.3
    rates = failed.sum(axis=3).cumsum(axis=2) / (25.0 * np.arange(1, 41))
    pooled = rates.mean(axis=1)
    error = np.sqrt(2 * pooled * (1 - pooled) / (25.0 * np.arange(1, 41)))
    wrong = (np.abs(rates[:, 1] - rates[:, 0]) > 1.96 * error).any(axis=1)
    assert wrong.mean() > 0.2
