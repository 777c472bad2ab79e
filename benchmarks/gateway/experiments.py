"""Measure how often experiments decide wrongly, and how many requests they need to decide rightly.

    python benchmarks/gateway/experiments.py [--runs 2000] [--requests 2000] [--every 50] [--repeats 20]

The requests are simulated: latencies and costs are log-normal (sigma 0.5 and 0.6), three requests of ten are
rated. The parts, in order:

  A/A       both arms are the same. Share of the runs in which, at any look, any statement is false: a
            difference in latency, rating, cost or errors, an interval of the error rate that does not hold
            the true one, or a decision to promote or to roll back. It has to stay below alpha, 5%.
  power     requests of the variant until a statement is certain, with a look after every 2% more requests:
            median and 90th percentile of the repeats. Both arms get the same number of requests; the last
            columns are for a variant that gets 10% of the requests.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.gateway.experiments.config import Experiment, Variant
from fovea.gateway.experiments.sequential import (
    Interval,
    Sample,
    amounts,
    both,
    events,
    mean_interval,
    mean_ratio,
    percentile_evidence,
    percentile_ratio,
    ratings,
)
from fovea.gateway.experiments.statistics import (
    AMOUNT_STEP,
    TIME_STEP,
    Statistics,
    amount_ceiling,
    amount_edge,
)
from fovea.gateway.experiments.verdict import CONTINUE, MICRO, STATEMENTS, Verdict, verdict

Counts = NDArray[np.float64]
ALPHA = 0.05 / STATEMENTS
ERROR_RATE = 0.003
RATED = 0.3
RATINGS = (0.05, 0.05, 0.15, 0.40, 0.35)
COST, LARGEST = 2000.0, 0.02 * MICRO
FIRST_TIME, TIMES = -260, 520
EDGES = 3 + math.floor(math.log(LARGEST) / AMOUNT_STEP)
COST_EDGES = np.array([amount_edge(number) for number in range(EDGES)])
EXPERIMENT = Experiment(
    name="a-a",
    model="m",
    largest_cost=LARGEST / MICRO,
    variants=(Variant("old", "m-1", 1.0), Variant("new", "m-2", 1.0)),
)


def time_buckets(latencies: Counts) -> NDArray[np.int64]:
    """Return the bucket of each latency, from 0 for the shortest that occurs here."""
    return np.floor(np.log(latencies) / TIME_STEP).astype(np.int64) - FIRST_TIME


def cost_counts(costs: Counts) -> Counts:
    """Return how often each edge was counted, for one group of costs per row: (rows, EDGES)."""
    low = 1 + np.floor(np.log(costs) / AMOUNT_STEP).astype(np.int64)
    edges = np.array([amount_edge(number) for number in range(EDGES + 1)])
    upper = np.clip((costs - edges[low]) / (edges[low + 1] - edges[low]), 0, 1)
    result = np.zeros((len(costs), EDGES))
    rows = np.arange(len(costs))[:, None] * EDGES
    for offset, shares in ((0, 1 - upper), (1, upper)):
        flat = (rows + low + offset).ravel()
        result += np.bincount(flat, shares.ravel(), minlength=result.size).reshape(result.shape)
    return result


@dataclass
class Arm:
    """The sums of one arm in all runs: one row per run."""

    runs: int
    requests: Counts = field(init=False)
    errors: Counts = field(init=False)
    times: Counts = field(init=False)
    costs: Counts = field(init=False)
    rated: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.requests, self.errors = np.zeros(self.runs), np.zeros(self.runs)
        self.times, self.costs = np.zeros((self.runs, TIMES)), np.zeros((self.runs, EDGES))
        self.rated = np.zeros((self.runs, 5))

    def add(self, rng: np.random.Generator, count: int) -> None:
        """Add the same number of requests to every run."""
        shape = (self.runs, count)
        failed = rng.random(shape) < ERROR_RATE
        self.requests += count
        self.errors += failed.sum(axis=1)
        self.times += _rows(time_buckets(rng.lognormal(0, 0.5, shape)), ~failed, TIMES)
        self.costs += cost_counts(np.minimum(rng.lognormal(math.log(COST), 0.6, shape), LARGEST))
        stars = np.searchsorted(np.cumsum(RATINGS)[:-1], rng.random(shape))
        self.rated += _rows(stars, rng.random(shape) < RATED, 5)

    @property
    def outcomes(self) -> Counts:
        """Requests that succeeded, and requests that failed: (runs, 2)."""
        return np.stack([self.requests - self.errors, self.errors], axis=1)

    def statistics(self, run: int) -> Statistics:
        """Return the sums of one run as a gateway has them."""
        sums = Statistics({("requests", 0): self.requests[run], ("errors", 0): self.errors[run]})
        for name, counts, first in (
            ("latency", self.times[run], FIRST_TIME),
            ("cost_share", self.costs[run], 0),
            ("rating", self.rated[run], 1),
        ):
            sums.amounts.update({(name, int(i) + first): float(counts[i]) for i in np.flatnonzero(counts)})
        return sums


def _rows(numbers: NDArray[np.int64], chosen: NDArray[np.bool_], size: int) -> Counts:
    """Count numbers from 0 to below `size` in each row, among the chosen ones."""
    flat = (numbers + np.arange(len(numbers))[:, None] * size)[chosen]
    return np.bincount(flat, minlength=len(numbers) * size).reshape(-1, size).astype(float)


def doubtful_runs(old: Arm, new: Arm) -> NDArray[np.int64]:
    """Return the runs in which a statement could be false; in all others none is.

    Two arms do not differ certainly as long as one common value is plausible for both. So it is enough to
    try one, the estimate from both arms together, and to compute intervals only if it is implausible. For all
    runs at once that is a thousand times quicker than all intervals.
    """
    limit = -math.log(ALPHA)
    bad = _percentile(old, new) >= limit
    bad |= _mean(ratings(np.ones(5)), old.rated, new.rated) >= limit
    bad |= _mean(amounts(COST_EDGES, np.ones(EDGES), amount_ceiling(LARGEST)), old.costs, new.costs) >= limit
    bad |= _mean(events(1, 2), old.outcomes, new.outcomes) >= limit
    truth = np.full(new.runs, ERROR_RATE)
    bad |= _against(events(1, 2), new.outcomes, truth) >= limit
    return np.flatnonzero(bad)


def _against(kind: Sample, counts: Counts, means: Counts) -> Counts:
    """Return the evidence of one arm against a mean in each run."""
    sample = replace(kind, counts=counts)
    return both(sample.log_above(means), sample.log_below(means))


def _mean(kind: Sample, old: Counts, new: Counts) -> Counts:
    """Return the evidence against the estimated common mean in each run."""
    together = old + new
    mean = together @ kind.values / np.maximum(together.sum(axis=1), 1)
    mean = np.clip(mean, kind.ceiling * 1e-9, kind.ceiling * (1 - 1e-9))
    return _against(kind, old, mean) + _against(kind, new, mean)


def _percentile(old: Arm, new: Arm) -> Counts:
    """Return the evidence against the estimated common p95 in each run."""
    together = np.cumsum(old.times + new.times, axis=1)
    bucket = (together >= 0.95 * together[:, -1:]).argmax(axis=1)[:, None]
    evidence = np.zeros(old.runs)
    for arm in (old, new):
        here = np.take_along_axis(arm.times, bucket, axis=1)[:, 0]
        total = arm.times.sum(axis=1)
        lower = np.take_along_axis(np.cumsum(arm.times, axis=1), bucket, axis=1)[:, 0] - here
        evidence += percentile_evidence(lower, total - lower - here, total, 0.95)
    return evidence


def falsehoods(found: Verdict) -> list[str]:
    """Return the false statements of a verdict on two equal arms."""
    truth = {"p95": 1.0, "rating": 1.0, "cost": 1.0, "errors": ERROR_RATE, "error_difference": 0.0}
    wrong = [
        each.name
        for each in found.reasons
        if each.name in truth and not each.interval.low <= truth[each.name] <= each.interval.high
    ]
    return wrong + ([found.decision] if found.decision != CONTINUE else [])


def equal_arms(runs: int, requests: int, every: int, seed: int) -> dict[str, Any]:
    """Simulate runs of two equal arms. requests: of both arms together, with a look after every `every`."""
    rng = np.random.default_rng(seed)
    old, new = Arm(runs), Arm(runs)
    wrong: dict[int, list[str]] = {}
    examined = 0
    for _ in range(requests // every):
        old.add(rng, every - every // 2)
        new.add(rng, every // 2)
        for run in doubtful_runs(old, new):
            examined += 1
            found = falsehoods(verdict(EXPERIMENT, "new", old.statistics(run), new.statistics(run)))
            if found:
                wrong.setdefault(int(run), found)
    names = [name for found in wrong.values() for name in found]
    return {
        "runs": runs,
        "requests": requests,
        "looks": requests // every,
        "false_runs": len(wrong),
        "false_share": len(wrong) / runs,
        "false_by_statement": {name: names.count(name) for name in sorted(set(names))},
        "verdicts_computed": examined,
    }


Certain = Callable[[int, int], bool]
"""Whether a statement is certain after so many requests of the baseline and of the variant."""


def needed(make: Callable[[np.random.Generator], Certain], repeats: int, share: float) -> list[float]:
    """Return the requests of the variant until a statement is certain, once per repeat; inf: never.

    share: part of the requests that the variant gets.
    """
    found = []
    for seed in range(repeats):
        certain = make(np.random.default_rng(seed))
        count = 20
        while count <= MOST and not certain(min(MOST_OLD, round(count * (1 - share) / share)), count):
            count = max(count + 1, math.ceil(count * 1.02))
        found.append(count if count <= MOST else math.inf)
    return sorted(found)


MOST, MOST_OLD = 100_000, 900_000


def latency(gain: float, says: Callable[[Interval], bool]) -> Callable[[np.random.Generator], Certain]:
    """Return a statement about the ratio of p95 latencies, if the variant is faster by a share."""

    def make(rng: np.random.Generator) -> Certain:
        old = time_buckets(rng.lognormal(0, 0.5, MOST_OLD))
        new = time_buckets((1 - gain) * rng.lognormal(0, 0.5, MOST))
        return lambda n, m: says(percentile_ratio(_histogram(old[:n]), _histogram(new[:m]), 95, ALPHA))

    return make


def _histogram(buckets: NDArray[np.int64]) -> dict[int, float]:
    counts = np.bincount(buckets)
    return {int(i): float(counts[i]) for i in np.flatnonzero(counts)}


def rating(gain: float, least: float) -> Callable[[np.random.Generator], Certain]:
    """Return that ratings are better by at least a share, if each is better by `gain` of the mean."""
    mean = float(np.dot(RATINGS, range(1, 6)))
    tilt = np.array(RATINGS) * np.exp(_tilt(mean * (1 + gain)) * np.arange(1, 6))
    chances = (np.array(RATINGS), tilt / tilt.sum())

    def make(rng: np.random.Generator) -> Certain:
        stars = [
            rng.choice(5, size, p=chance) for size, chance in zip((MOST_OLD, MOST), chances, strict=True)
        ]

        def certain(n: int, m: int) -> bool:
            counts = [
                np.bincount(each[:k], minlength=5).astype(float)
                for each, k in zip(stars, (n, m), strict=True)
            ]
            return mean_ratio(ratings(counts[0]), ratings(counts[1]), ALPHA, 1.0).low >= 1 + least

        return certain

    return make


def _tilt(mean: float) -> float:
    """Return the exponent with which tilted RATINGS have a mean."""
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        parts = np.array(RATINGS) * np.exp(middle * np.arange(1, 6))
        low, high = (middle, high) if parts @ np.arange(1, 6) / parts.sum() < mean else (low, middle)
    return low


def cost(factor: float, most: float) -> Callable[[np.random.Generator], Certain]:
    """Return that a request costs at most `most` times the baseline's, if it costs `factor` times as much."""

    def make(rng: np.random.Generator) -> Certain:
        costs = [
            np.minimum(scale * rng.lognormal(math.log(COST), 0.6, size), LARGEST)
            for scale, size in ((1.0, MOST), (factor, MOST))
        ]

        def certain(n: int, m: int) -> bool:
            arms = [
                amounts(COST_EDGES, cost_counts(each[None, :k])[0], amount_ceiling(LARGEST))
                for each, k in zip(costs, (min(n, MOST), m), strict=True)
            ]
            return mean_ratio(arms[0], arms[1], ALPHA).high <= most

        return certain

    return make


def error_rate(true: float, says: Callable[[Interval], bool]) -> Callable[[np.random.Generator], Certain]:
    """Return a statement about the variant's error rate."""

    def make(rng: np.random.Generator) -> Certain:
        failed = np.cumsum(rng.random(MOST) < true)
        return lambda _, m: says(mean_interval(events(float(failed[m - 1]), m), ALPHA))

    return make


STATEMENTS_OF_POWER: dict[str, Callable[[np.random.Generator], Certain]] = {
    "p95: true gain 5%, 'better'": latency(0.05, lambda found: found.high < 1),
    "p95: true gain 10%, 'better'": latency(0.10, lambda found: found.high < 1),
    "p95: true gain 20%, 'better'": latency(0.20, lambda found: found.high < 1),
    "p95: true gain 15%, 'better by at least 10%'": latency(0.15, lambda found: found.high <= 0.9),
    "p95: true gain 20%, 'better by at least 10%'": latency(0.20, lambda found: found.high <= 0.9),
    "p95: true gain 30%, 'better by at least 10%'": latency(0.30, lambda found: found.high <= 0.9),
    "p95: twice the baseline's, roll back above 1.5": latency(-1.0, lambda found: found.low > 1.5),
    "rating: true gain 8%, 'better by at least 5%' (ratings)": rating(0.08, 0.05),
    "rating: true gain 10%, 'better by at least 5%' (ratings)": rating(0.10, 0.05),
    "cost: no true change, 'at most 1.2'": cost(1.0, 1.2),
    "cost: true increase 10%, 'at most 1.2'": cost(1.1, 1.2),
    "errors: true rate 0.1%, 'at most 0.5%'": error_rate(0.001, lambda found: found.high <= 0.005),
    "errors: true rate 0.2%, 'at most 0.5%'": error_rate(0.002, lambda found: found.high <= 0.005),
    "errors: true rate 10%, roll back above 5%": error_rate(0.10, lambda found: found.low > 0.05),
    "errors: true rate 30%, roll back above 5%": error_rate(0.30, lambda found: found.low > 0.05),
}


def power(repeats: int) -> list[dict[str, Any]]:
    """Return median and 90th percentile of the variant's requests that each statement needs."""
    rows = []
    for name, make in STATEMENTS_OF_POWER.items():
        row: dict[str, Any] = {"statement": name}
        for share in (0.5, 0.1):
            counts = needed(make, repeats, share)
            row[f"median_{share:g}"] = counts[(len(counts) - 1) // 2]
            row[f"p90_{share:g}"] = counts[math.ceil(0.9 * len(counts)) - 1]
        rows.append(row)
        shown = "".join(f"{_shown(value):>10}" for value in list(row.values())[1:])
        print(f"{name:58}{shown}", flush=True)
    return [
        {key: None if value == math.inf else value for key, value in row.items()} for row in rows
    ]  # JSON has no infinity


def _shown(value: float) -> str:
    return f"> {MOST // 1000}k" if value == math.inf else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000, help="A/A runs (default: 2000)")
    parser.add_argument("--requests", type=int, default=2000, help="requests of a run (default: 2000)")
    parser.add_argument("--every", type=int, default=50, help="requests between two looks (default: 50)")
    parser.add_argument("--repeats", type=int, default=20, help="repeats of the power table (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begun = time.process_time()
    same = equal_arms(args.runs, args.requests, args.every, args.seed)
    same["cpu_s"] = round(time.process_time() - begun, 1)
    print(
        f"A/A: {same['false_runs']} of {same['runs']} runs with a false statement at any of {same['looks']} "
        f"looks ({same['false_share']:.2%}; alpha is 5%); {same['cpu_s']} s of processor time"
    )
    print(f"{'requests of the variant until certain':58}{'median':>10}{'p90':>10}{'10%: med':>10}{'p90':>10}")
    rows = power(args.repeats)
    print(json.dumps({"equal_arms": same, "power": rows}))


if __name__ == "__main__":
    main()
