"""Confidence sequences: intervals that hold at all looks together, for one arm and for a ratio of two arms.

An interval for one arm holds the values against which there is little evidence (`evidence.py`): less than
log(1/alpha).

An interval for the ratio of two arms holds every r for which *some* value x of the first arm goes with r x of
the second: the evidence against x from the first arm and that against r x from the second, added, are less
than log(1/alpha). At the true x and r x the product of both capitals is a supermartingale, because every
request adds to one arm only. So the true r is in the interval at all looks together with a probability of at
least 1 - alpha. This is tighter than to divide two intervals: half as many requests or less, because both
arms are unlikely to be wrong at once. (Howard and Ramdas 2022 compare quantiles of two arms in this way.)

The values x lie on a lattice. Every cell of it gets the least evidence that any of its values could have, so
that cells make intervals wider and never too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fovea.gateway.experiments.evidence import (
    LOG_HALF,
    LOG_UNBET,
    Array,
    Bets,
    bets,
    both,
    log_binomial_capital,
    log_capital,
)
from fovea.gateway.experiments.histogram import TIME_STEP

CELLS = 160
"""Cells of the plausible values of two arms."""
_POINTS, _ROUNDS = 31, 5
_TYPICAL_BET = 0.04
"""Best share to bet on an event of probability 1/2 at about 10,000 requests."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval that holds a value at all looks together.

    low, high: its ends; infinite where the data say nothing.
    """

    low: float
    high: float

    def excludes(self, value: float) -> bool:
        return value < self.low or value > self.high


EVERYTHING = Interval(0.0, math.inf)


@dataclass(frozen=True, slots=True)
class Sample:
    """Observations of one arm, with values from 0 to a ceiling, as counts per value.

    values, counts: (values,).
    ceiling: the largest value that was possible. It is chosen before the data are seen.
    above, below: bets that the mean is higher, or lower, than supposed.
    """

    values: Array
    counts: Array
    ceiling: float
    above: Bets
    below: Bets

    @property
    def total(self) -> float:
        return float(self.counts.sum())

    @property
    def mean(self) -> float:
        return float(self.values @ self.counts) / self.total

    def log_above(self, means: Array) -> Array:
        """Evidence that the mean is above each of these, which are above 0. It falls as they grow."""
        return log_capital(self.values, self.counts, means, self.above)

    def log_below(self, means: Array) -> Array:
        """Evidence that the mean is below each of these, which are below the ceiling. It grows with them."""
        return log_capital(self.ceiling - self.values, self.counts, self.ceiling - means, self.below)


def events(count: float, total: float) -> Sample:
    """Return a sample of requests with or without a rare event, such as an error."""
    return Sample(np.array([0.0, 1.0]), np.array([total - count, count]), 1.0, bets(0.005), bets(0.5))


def ratings(counts: Array) -> Sample:
    """Return a sample of ratings 1 to 5, as the values 0 to 4. counts: (5,)."""
    return Sample(np.arange(5.0), counts, 4.0, bets(0.3), bets(0.2))


def amounts(values: Array, counts: Array, ceiling: float) -> Sample:
    """Return a sample of amounts that are usually far below the ceiling, such as costs."""
    return Sample(values, counts, ceiling, bets(0.05), bets(0.5))


def mean_interval(sample: Sample, alpha: float) -> Interval:
    """Return the interval of a sample's mean. Its ends are within 0 and the ceiling."""
    if sample.total <= 0:
        return Interval(0.0, sample.ceiling)
    return Interval(*_plausible(sample, -math.log(alpha)))


def mean_difference(first: Sample, second: Sample, alpha: float) -> Interval:
    """Return the interval of the second arm's mean minus the first's. Both have the same ceiling."""
    ceiling = first.ceiling
    if first.total <= 0 or second.total <= 0:
        return Interval(-ceiling, ceiling)
    limit = -math.log(alpha)
    ends = [_plausible(sample, limit - LOG_UNBET) for sample in (first, second)]
    step = max(high - low for low, high in ends) / CELLS
    lattice = _Lattice(step, lambda positions: positions * step)
    least, most = _shifts(_cells(first, ends[0], lattice), _cells(second, ends[1], lattice), limit)
    return Interval(max(-ceiling, (least - 1) * step), min(ceiling, (most + 1) * step))


def mean_ratio(first: Sample, second: Sample, alpha: float, offset: float = 0.0) -> Interval:
    """Return the interval of the second arm's mean divided by the first's.

    offset: added to both means before they are divided.
    """
    if first.total <= 0 or second.total <= 0:
        return EVERYTHING
    limit = -math.log(alpha)
    ends = [_plausible(sample, limit - LOG_UNBET) for sample in (first, second)]
    if any(low + offset <= 0 for low, _ in ends):
        return EVERYTHING  # one of the means may be 0
    logs = [(math.log(low + offset), math.log(high + offset)) for low, high in ends]
    step = max(high - low for low, high in logs) / CELLS
    lattice = _Lattice(step, lambda positions: np.exp(positions * step) - offset)
    least, most = _shifts(_cells(first, logs[0], lattice), _cells(second, logs[1], lattice), limit)
    return Interval(math.exp((least - 1) * step), math.exp((most + 1) * step))


def percentile_ratio(
    first: Mapping[int, float], second: Mapping[int, float], share: float, alpha: float
) -> Interval:
    """Return the interval of the second arm's percentile of times divided by the first's.

    first, second: counts per bucket of times (`histogram.time_bucket`).
    share: percent of the times that do not exceed the percentile, above 0 and below 100.
    """
    if not first or not second:
        return EVERYTHING
    limit = -math.log(alpha)
    least, most = _shifts(_buckets(first, share / 100), _buckets(second, share / 100), limit)
    return Interval(math.exp((least - 1) * TIME_STEP), math.exp((most + 1) * TIME_STEP))


def percentile_evidence(lower: Array, higher: Array, total: float | Array, chance: float) -> Array:
    """Return the evidence against places of a percentile.

    A place has times that are certainly lower, times that are certainly higher, and times of its own bucket.

    lower, higher: (n,), numbers of times.
    total: times of the arm, for all n places together or for each.
    chance: probability that a time does not exceed the percentile.
    """
    odds = math.sqrt(chance / (1 - chance))
    return both(
        log_binomial_capital(lower, total, chance, bets(min(0.5, _TYPICAL_BET * odds))),
        log_binomial_capital(higher, total, 1 - chance, bets(min(0.5, _TYPICAL_BET / odds))),
    )


@dataclass(frozen=True, slots=True)
class _Lattice:
    """Positions 0, 1, 2, ... of a scale, on which supposed means are compared.

    step: distance of two positions.
    mean: turns positions into means.
    """

    step: float
    mean: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class _Cells:
    """Evidence against the cells of a lattice.

    start: position of the first cell.
    evidence: (cells,), logarithms of capital.
    open_ends: whether the first cell stands for all values up to it, and the last one for all from it.
    """

    start: int
    evidence: Array
    open_ends: bool = False


def _plausible(sample: Sample, limit: float) -> tuple[float, float]:
    """Return ends outside of which the evidence against every mean is at least the limit.

    Evidence is that of `both`: half of the capital is bet on each side.
    """
    least, mean = limit - LOG_HALF, min(max(sample.mean, 0.0), sample.ceiling)
    low, high = 0.0, mean  # low is excluded, or 0
    for _ in range(_ROUNDS):
        if high <= low:
            break
        points = np.linspace(low, high, _POINTS + 2)[1:-1]
        excluded = int((sample.log_above(points) >= least).sum())
        low, high = _around(low, points, high, excluded)
    bottom, low, high = low, mean, sample.ceiling  # high is excluded, or the ceiling
    for _ in range(_ROUNDS):
        if high <= low:
            break
        points = np.linspace(low, high, _POINTS + 2)[1:-1]
        plausible = int((sample.log_below(points) < least).sum())
        low, high = _around(low, points, high, plausible)
    return bottom, high


def _around(low: float, points: Array, high: float, count: int) -> tuple[float, float]:
    """Return the neighbours of the boundary that has `count` of the points below it."""
    return (
        low if count == 0 else float(points[count - 1]),
        high if count == len(points) else float(points[count]),
    )


def _cells(sample: Sample, ends: tuple[float, float], lattice: _Lattice) -> _Cells:
    """Return the least evidence in every cell between two ends, which are on the lattice's scale."""
    start, end = math.floor(ends[0] / lattice.step), math.ceil(ends[1] / lattice.step)
    means = lattice.mean(np.arange(start, max(end, start + 1) + 1, dtype=float))
    tiny = sample.ceiling * 1e-12
    above = sample.log_above(np.maximum(means[1:], tiny))
    below = sample.log_below(np.clip(means[:-1], 0.0, sample.ceiling - tiny))
    return _Cells(start, both(above, below))


def _buckets(counts: Mapping[int, float], chance: float) -> _Cells:
    """Return the least evidence that the percentile is in a bucket, for every bucket and both ends.

    If it is in a bucket, the times in lower buckets are below it, which have at most the probability
    `chance`, and those in higher buckets exceed it, which have at most the probability 1 - `chance`.
    """
    first, last = min(counts), max(counts)
    dense = np.zeros(last - first + 3)
    for bucket, count in counts.items():
        dense[bucket - first + 1] = count
    total = float(dense.sum())
    lower = np.cumsum(dense) - dense
    higher = total - lower - dense
    return _Cells(first - 1, percentile_evidence(lower, higher, total, chance), open_ends=True)


def _shifts(first: _Cells, second: _Cells, limit: float) -> tuple[float, float]:
    """Return the least and the greatest distance between plausible cells of two arms, in cells."""
    ours, theirs = (np.flatnonzero(arm.evidence < limit - LOG_UNBET) for arm in (first, second))
    plausible = first.evidence[ours][:, None] + second.evidence[theirs] < limit
    if not plausible.any():
        return -math.inf, math.inf
    distances = (second.start + theirs) - (first.start + ours)[:, None]
    pairs = distances[plausible]
    least, most = float(pairs.min()), float(pairs.max())
    if first.open_ends:
        rows, columns = ours[plausible.any(axis=1)], theirs[plausible.any(axis=0)]
        if rows[-1] == len(first.evidence) - 1 or columns[0] == 0:
            least = -math.inf
        if rows[0] == 0 or columns[-1] == len(second.evidence) - 1:
            most = math.inf
    return least, most
