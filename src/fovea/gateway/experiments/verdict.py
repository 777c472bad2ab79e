"""Decides from the sums of a variant and of its baseline whether to promote it, roll it back, or wait.

Every statement rests on an interval that holds at all looks together. An experiment with k variants beside
the baseline makes five statements about each: its error rate, and how its error rate, p95 latency, rating and
cost compare with the baseline's. Each interval gets alpha / (5 k), so that all statements ever made about the
experiment are true together with a probability of at least 1 - alpha (the union bound).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fovea.gateway.experiments import sequential
from fovea.gateway.experiments.config import Experiment
from fovea.gateway.experiments.statistics import Statistics, amount_ceiling, amount_edge

PROMOTE, ROLL_BACK, CONTINUE = "promote", "roll_back", "continue"
STATEMENTS = 5
MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class Result:
    """One criterion or guard rail, and what the data say about it.

    name: `p95`, `rating`, `cost`, `errors` (criteria), `guard:errors`, `guard:p95` (guard rails), or
        `error_difference`, which only informs.
    value: the estimate; None if there are no data.
    interval: where the true value is. The estimate can be outside of it only by the width of a bucket.
    bound: the value that decides; for `error_difference` 0.
    met: whether the criterion is certainly met (True) or certainly not (False); None: not known yet.
    words: the finding in words, such as `better by at least 10%`.
    """

    name: str
    value: float | None
    interval: sequential.Interval
    bound: float
    met: bool | None
    words: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a variant, and the reasons for it.

    decision: `promote`, `roll_back` or `continue`.
    reasons: all results; those that decide are named in `words`.
    """

    variant: str
    decision: str
    reasons: tuple[Result, ...]
    words: str


def verdicts(experiment: Experiment, sums: Mapping[str, Statistics]) -> tuple[Verdict, ...]:
    """Return the verdict on every variant except the baseline. sums: statistics by name of the variant."""
    nothing = Statistics()
    baseline = sums.get(experiment.baseline.name, nothing)
    return tuple(
        verdict(experiment, variant.name, baseline, sums.get(variant.name, nothing))
        for variant in experiment.variants[1:]
    )


def verdict(experiment: Experiment, variant: str, baseline: Statistics, ours: Statistics) -> Verdict:
    """Return the verdict on one variant.

    baseline, ours: the sums of the baseline and of the variant.
    """
    criteria, guard = experiment.criteria, experiment.guard
    alpha = criteria.alpha / (STATEMENTS * (len(experiment.variants) - 1))
    errors = sequential.mean_interval(_errors(ours), alpha)
    p95 = sequential.percentile_ratio(baseline.histogram("latency"), ours.histogram("latency"), 95, alpha)
    speed = _quotient(baseline.percentile("latency", 95), ours.percentile("latency", 95))
    reasons = (
        _latency(speed, p95, criteria.p95_gain),
        _rating(baseline, ours, criteria.rating_gain, alpha),
        _cost(experiment, baseline, ours, alpha),
        _limit("errors", ours.error_rate, errors, criteria.error_rate),
        _limit("guard:errors", ours.error_rate, errors, guard.error_rate),
        _limit("guard:p95", speed, p95, guard.p95_factor),
        _difference(baseline, ours, alpha),
    )
    return _decide(experiment, variant, ours, reasons)


def _decide(experiment: Experiment, variant: str, ours: Statistics, reasons: tuple[Result, ...]) -> Verdict:
    broken = [each for each in reasons if each.name.startswith("guard:") and each.met is False]
    if broken and ours.requests >= experiment.guard.min_requests:
        words = "; ".join(f"guard rail {each.name.removeprefix('guard:')}: {each.words}" for each in broken)
        return Verdict(variant, ROLL_BACK, reasons, words)
    required = [each for each in reasons if each.name in experiment.criteria.required]
    if all(each.met for each in required):
        return Verdict(
            variant, PROMOTE, reasons, "; ".join(f"{each.name}: {each.words}" for each in required)
        )
    missing = "; ".join(f"{each.name}: {each.words}" for each in required if not each.met)
    return Verdict(variant, CONTINUE, reasons, missing)


def _errors(sums: Statistics) -> sequential.Sample:
    return sequential.events(sums.errors, sums.requests)


def _ratings(sums: Statistics) -> sequential.Sample:
    counts = sums.histogram("rating")
    return sequential.ratings(np.array([counts.get(value, 0.0) for value in range(1, 6)], dtype=float))


def _costs(sums: Statistics, largest: float) -> sequential.Sample:
    counts = sums.histogram("cost_share")
    edges = sorted(counts)
    return sequential.amounts(
        np.array([amount_edge(edge) for edge in edges], dtype=float),
        np.array([counts[edge] for edge in edges], dtype=float),
        amount_ceiling(largest),
    )


def _rating(baseline: Statistics, ours: Statistics, gain: float, alpha: float) -> Result:
    interval = sequential.mean_ratio(_ratings(baseline), _ratings(ours), alpha, offset=1.0)
    bound = 1 + gain
    met = _certain(interval.low >= bound, interval.high < bound)
    words = _compared(met, gain, better=interval.low > 1, worse=interval.high < 1)
    return Result("rating", _quotient(baseline.rating, ours.rating), interval, bound, met, words)


def _latency(value: float | None, interval: sequential.Interval, gain: float) -> Result:
    bound = 1 - gain
    met = _certain(interval.high <= bound, interval.low > bound)
    words = _compared(met, gain, better=interval.high < 1, worse=interval.low > 1)
    return Result("p95", value, interval, bound, met, words)


def _cost(experiment: Experiment, baseline: Statistics, ours: Statistics, alpha: float) -> Result:
    largest = experiment.largest_cost * MICRO
    old, new = _costs(baseline, largest), _costs(ours, largest)
    has_both = old.total > 0 and new.total > 0
    value = _quotient(old.mean, new.mean) if has_both else None
    return _limit(
        "cost", value, sequential.mean_ratio(old, new, alpha), 1 + experiment.criteria.cost_increase
    )


def _limit(name: str, value: float | None, interval: sequential.Interval, bound: float) -> Result:
    """Judge a value that must not exceed a bound."""
    met = _certain(interval.high <= bound, interval.low > bound)
    words = {True: "certainly at most", False: "certainly above", None: "not yet certain to be at most"}[met]
    return Result(name, value, interval, bound, met, f"{words} {bound:.4g}")


def _difference(baseline: Statistics, ours: Statistics, alpha: float) -> Result:
    """Compare the shares of failed requests."""
    interval = sequential.mean_difference(_errors(baseline), _errors(ours), alpha)
    old, new = baseline.error_rate, ours.error_rate
    words = _compared(None, 0.0, better=interval.high < 0, worse=interval.low > 0)
    return Result(
        "error_difference", None if old is None or new is None else new - old, interval, 0.0, None, words
    )


def _certain(yes: bool, no: bool) -> bool | None:
    return True if yes else False if no else None


def _compared(met: bool | None, gain: float, *, better: bool, worse: bool) -> str:
    """Describe a difference of two arms. gain: the least improvement that counts, as a share."""
    if met:
        return f"better by at least {100 * gain:.3g}%"
    if worse:
        return "worse"
    if met is None:
        return "better" if better else "no difference is certain"
    return f"better, but by less than {100 * gain:.3g}%" if better else f"not better by {100 * gain:.3g}%"


def _quotient(old: float | None, new: float | None) -> float | None:
    return None if old is None or new is None or old == 0 else new / old
