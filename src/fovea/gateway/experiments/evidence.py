"""Evidence against a supposed mean or percentile, which stays valid however often one looks.

The idea is a fair bet. Somebody who believes that a quantity X >= 0 has a mean above m starts with a capital
of 1 and, at every observation, bets the share c of it: the capital is multiplied by 1 - c + c X / m. If the
mean is m or less, this game is not favourable, so the capital is a non-negative supermartingale, and by
Ville's inequality it ever exceeds 1/alpha with a probability of at most alpha - at any look, after any number
of observations. A large capital is evidence that the mean is above m. That the mean is below m is bet in the
same way with the distance to the ceiling, C - X, whose mean would be C - m.

A believer does not know the best c. So the capital is divided among a grid of them (the method of mixtures),
most of it near the c that is best at the number of observations in which one is interested. A part stays
unbet (c = 0): evidence is never below that part, which bounds the supposed values that have to be examined.
The shares c are fixed in advance. That is why the result depends on counts alone, not on their order, and why
counts of several processes can be added.

A percentile is a mean in disguise: a time exceeds the 95th percentile with a probability of 5%.

Sources: Ville 1939; Robbins 1970 (mixtures); Waudby-Smith and Ramdas 2024, "Estimating means of bounded
random variables by betting", JRSS-B 86(1); Howard and Ramdas 2022, "Sequential estimation of quantiles with
applications to A/B testing and best-arm identification", Bernoulli 28(3).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    """Return bets of which most are within a few times of a centre, and some of any size.

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
