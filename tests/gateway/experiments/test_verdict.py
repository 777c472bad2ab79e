"""True gains lead to the right verdict with a documented number of requests; harm is rolled back quickly."""

from __future__ import annotations

import math

import pytest

from fovea.gateway.experiments.config import CRITERIA, Criteria, Guard
from fovea.gateway.experiments.statistics import Statistics
from fovea.gateway.experiments.verdict import Result, Verdict, verdict, verdicts
from tests.gateway.experiments.support import NEW, NEXT, OLD, an_experiment, arm
from tests.support.thorough import others_slow

BETTER = (0.02, 0.03, 0.05, 0.30, 0.60)
"""Ratings whose mean is 12% above the usual one."""


def judged(old: Statistics, new: Statistics, **values: object) -> Verdict:
    return verdict(an_experiment(**values), "new", old, new)


def result(found: Verdict, name: str) -> Result:
    return next(each for each in found.reasons if each.name == name)


@pytest.mark.parametrize("seed", others_slow(range(4), [0]))
def test_a_gain_of_20_percent_is_certainly_more_than_10_within_12000_requests(seed: int) -> None:
    found = judged(arm(seed, 12_000), arm(seed + 100, 12_000, speed=0.8))
    p95 = result(found, "p95")
    assert (p95.words, p95.met) == ("better by at least 10%", True)
    assert p95.interval.low <= 0.8 <= p95.interval.high <= p95.bound


@pytest.mark.parametrize("seed", others_slow(range(4), [0]))
def test_a_gain_of_10_percent_is_better_within_12000_requests_but_not_by_more_than_10(seed: int) -> None:
    p95 = result(judged(arm(seed, 12_000), arm(seed + 100, 12_000, speed=0.9)), "p95")
    assert (p95.words, p95.met) == ("better", None)


def test_a_gain_of_5_percent_is_better_but_by_less_than_10() -> None:
    old, new = arm(1, 40_000), arm(2, 40_000, speed=0.95)
    for _ in range(2):
        old.merge(Statistics(old.amounts))
        new.merge(Statistics(new.amounts))
    p95 = result(judged(old, new), "p95")
    assert (p95.words, p95.met) == ("better, but by less than 10%", False)


def test_a_variant_that_meets_all_criteria_is_promoted() -> None:
    old, new = arm(1, 12_000), arm(2, 12_000, speed=0.75, ratings=BETTER, cost=2100.0)
    found = judged(old, new)
    assert found.decision == "promote"
    assert {each.name for each in found.reasons if each.met and each.name in CRITERIA} == set(CRITERIA)


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"speed": 1.0, "ratings": BETTER}, "p95: not better by 10%"),
        ({"speed": 0.75}, "rating: not better by 5%"),
        ({"speed": 0.75, "ratings": BETTER, "cost": 3000.0}, "cost: certainly above 1.2"),
        ({"speed": 0.75, "ratings": BETTER, "error_rate": 0.01}, "errors: certainly above 0.005"),
    ],
)
def test_one_criterion_that_is_not_met_is_enough_to_wait(values: dict[str, object], missing: str) -> None:
    found = judged(arm(1, 12_000), arm(2, 12_000, **values))  # type: ignore[arg-type]
    assert (found.decision, found.words) == ("continue", missing)


def test_a_criterion_that_is_not_required_does_not_count() -> None:
    found = judged(arm(1, 12_000), arm(2, 12_000, speed=0.75), criteria=Criteria(required=("p95", "errors")))
    assert found.decision == "promote"
    assert result(found, "rating").met is False


def test_a_variant_that_fails_often_is_rolled_back_within_150_requests() -> None:
    found = judged(arm(1, 150), arm(2, 150, error_rate=0.3))
    assert found.decision == "roll_back"
    assert found.words.startswith("guard rail errors: certainly above 0.05")


def test_a_slow_variant_is_rolled_back_within_1000_requests() -> None:
    found = judged(arm(1, 1000), arm(2, 1000, speed=2.2))
    assert (found.decision, found.words) == ("roll_back", "guard rail p95: certainly above 1.5")


def test_a_guard_rail_waits_for_the_least_number_of_requests() -> None:
    bad = arm(2, 60, error_rate=1.0)
    assert judged(arm(1, 100), bad).decision == "roll_back"
    assert judged(arm(1, 100), bad, guard=Guard(min_requests=61)).decision == "continue"


def test_without_data_nothing_is_decided() -> None:
    found = judged(Statistics(), Statistics())
    assert found.decision == "continue"
    assert all(each.met is None and each.value is None for each in found.reasons)


def test_more_variants_make_wider_intervals() -> None:
    """Every variant could be wrong, so each statement gets a smaller part of alpha."""
    old, new = arm(1, 4000), arm(2, 4000)
    one = result(judged(old, new), "p95").interval
    three = verdicts(an_experiment(variants=(OLD, NEW, NEXT)), {"old": old, "new": new, "next": new})
    assert [each.variant for each in three] == ["new", "next"]
    wide = result(three[0], "p95").interval
    assert math.log(wide.high / wide.low) > math.log(one.high / one.low)


def test_sums_in_two_parts_give_the_same_verdict() -> None:
    old, parts = arm(1, 3000), [arm(2, 1000, speed=0.8), arm(3, 2000, speed=0.8)]
    forward, backward = Statistics(), Statistics()
    for part in parts:
        forward.merge(part)
    for part in parts[::-1]:
        backward.merge(part)
    assert forward.amounts == backward.amounts
    assert judged(old, forward) == judged(old, backward)
