"""Confidence sequences: intervals that hold at all looks together, for one arm and for a ratio of two arms.

They rest on evidence against a supposed mean or percentile, which stays valid however often one looks. The
idea is a fair bet. Somebody who believes that a quantity X >= 0 has a mean above m starts with a capital of 1
and, at every observation, bets the share c of it: the capital is multiplied by 1 - c + c X / m. If the mean
is m or less, this game is not favourable, so the capital is a non-negative supermartingale, and by Ville's
inequality it ever exceeds 1/alpha with a probability of at most alpha - at any look, after any number of
observations. A large capital is evidence that the mean is above m. That the mean is below m is bet in the
same way with the distance to the ceiling, C - X, whose mean would be C - m.

A believer does not know the best c. So the capital is divided among a grid of them (the method of mixtures),
most of it near the c that is best at the number of observations in which one is interested. A part stays
unbet (c = 0): evidence is never below that part, which bounds the supposed values that have to be examined.
The shares c are fixed in advance. That is why the result depends on counts alone, not on their order, and why
counts of several processes can be added. A percentile is a mean in disguise: a time exceeds the 95th
percentile with a probability of 5%.

An interval for one arm holds the values against which there is little evidence: less than log(1/alpha).

An interval for the ratio of two arms holds every r for which *some* value x of the first arm goes with r x of
the second: the evidence against x from the first arm and that against r x from the second, added, are less
than log(1/alpha). At the true x and r x the product of both capitals is a supermartingale, because every
request adds to one arm only. So the true r is in the interval at all looks together with a probability of at
least 1 - alpha. This is tighter than to divide two intervals: half as many requests or less, because both
arms are unlikely to be wrong at once.

The values x lie on a lattice. Every cell of it gets the least evidence that any of its values could have, so
that cells make intervals wider and never too narrow.

Sources: Ville 1939; Robbins 1970 (mixtures); Waudby-Smith and Ramdas 2024, "Estimating means of bounded
random variables by betting", JRSS-B 86(1); Howard and Ramdas 2022, "Sequential estimation of quantiles with
applications to A/B testing and best-arm identification", Bernoulli 28(3), who compare quantiles of two arms
in this way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fovea.gateway.experiments.statistics import TIME_STEP

Array = NDArray[np.float64]
UNBET = 0.1
"""Part of the capital that is never bet."""
LOG_UNBET = math.log(UNBET)
LOG_HALF = math.log(0.5)
SMALLEST_BET, LARGEST_BET, BETS = 1e-5, 0.95, 28


@dataclass(frozen=True, slots=True)
class Bets:
    """A division of the capital among shares to bet.

    shares: (bets,), each from 0 to below 1.
    log_weights: (bets,), logarithms of the parts of the capital, which add up to 1.
    """

    shares: Array
    log_weights: Array


@functools.cache
def bets(centre: float) -> Bets:
    """Return bets, most of them within a few times of a centre, and some of any size.

    The parts fall as a half-Cauchy distribution of the share: with the distance from the centre, on both
    sides.
    """
    shares = np.geomspace(SMALLEST_BET, LARGEST_BET, BETS)
    parts = 1 / (shares / centre + centre / shares)
    parts *= (1 - UNBET) / parts.sum()
    return Bets(np.concatenate(([0.0], shares)), np.log(np.concatenate(([UNBET], parts))))


def log_capital(values: Array, counts: Array, means: Array, stakes: Bets) -> Array:
    """Return the logarithm of the capital of a bet that the mean is above m, for every m of an array.

    values: (values,), not negative.
    counts: (values,), how often each was observed, or (means, values), other observations for every m. A
        count may be a fraction: an observation that is divided between two values never makes more capital
        than itself (the logarithm is concave).
    means: (means,), above 0.

    Returns (means,). It falls as m grows.
    """
    gains = np.log1p(stakes.shares[:, None] * (values / means[:, None, None] - 1))
    return _mixed(stakes.log_weights + (gains @ counts[..., None])[..., 0])


def log_binomial_capital(hits: Array, total: float | Array, chance: float, stakes: Bets) -> Array:
    """Return the logarithm of the capital of a bet that hits are more likely than a chance.

    hits: (n,), numbers of hits; for each, another bet.
    total: observations of all bets, or (n,), those of each.

    Returns (n,). It grows with the hits.
    """
    hit, miss = np.log1p(stakes.shares * (1 / chance - 1)), np.log1p(-stakes.shares)
    return _mixed(stakes.log_weights + hits[:, None] * hit + (total - hits)[:, None] * miss)


def both(above: Array, below: Array) -> Array:
    """Return the logarithm of the capital that is divided evenly between two bets, given their logarithms."""
    return np.logaddexp(above, below) + LOG_HALF


def _mixed(logs: Array) -> Array:
    """Return log(sum(exp(logs))) over the last axis."""
    top = logs.max(axis=-1)
    result: Array = top + np.log(np.exp(logs - top[..., None]).sum(axis=-1))
    return result


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
    first: Mapping[int, float], second: Mapping[int, float], percent: float, alpha: float
) -> Interval:
    """Return the interval of the second arm's percentile of times divided by the first's.

    first, second: counts per bucket of times (`histogram.time_bucket`).
    percent: part of the times that do not exceed the percentile, in percent, above 0 and below 100.
    """
    if not first or not second:
        return EVERYTHING
    limit = -math.log(alpha)
    least, most = _shifts(_buckets(first, percent / 100), _buckets(second, percent / 100), limit)
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
    """Return two ends; the evidence against every mean outside of them is at least the limit.

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
