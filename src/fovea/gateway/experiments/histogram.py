"""Histograms with log-spaced buckets: small, mergeable by addition, and with a known error.

A histogram is a mapping of bucket numbers to counts. Only buckets with a count exist.

Times use buckets that are 1.1% wide (64 per doubling). A percentile read from them is at most 1.1% wrong.

Amounts whose mean matters (cost) use edges that are 9% apart (8 per doubling), and every amount is divided
between the two edges around it, so that the mean of the histogram is the mean of the amounts: 103 between the
edges 100 and 109 counts as two thirds of a 100 and one third of a 109.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

TIME_STEP = math.log(2) / 64
"""Natural logarithm of the ratio of two edges of times."""
AMOUNT_STEP = math.log(2) / 8
"""Natural logarithm of the ratio of two edges of amounts."""
SHORTEST_S, LONGEST_S = 1e-6, 1e6
"""Times outside of these seconds are counted at the nearer end."""
_PARTS = 1 << 20
_TIMES_PER_LOG = 1 / TIME_STEP


def time_bucket(seconds: float) -> int:
    """Return the number of the bucket of a time. Bucket 0 begins at 1 s; those of shorter times are negative.

    Raises ValueError for NaN.
    """
    bounded = min(max(seconds, SHORTEST_S), LONGEST_S)
    return math.floor(math.log(bounded) * _TIMES_PER_LOG)


def time_edge(bucket: int) -> float:
    """Return the lower edge of a bucket of times, in seconds."""
    return math.exp(bucket * TIME_STEP)


def amount_shares(amount: float) -> tuple[tuple[int, float], tuple[int, float]]:
    """Divide an amount between the two edges around it: (edge, share) twice. The shares add up to 1.

    Edge 0 is the amount 0, edge 1 the amount 1, edge k the amount 2^((k - 1) / 8). Shares are multiples of
    2^-20, so that sums of them are exact in any order.

    amount: not negative.
    """
    below = 0 if amount < 1 else 1 + math.floor(math.log(amount) / AMOUNT_STEP)
    low, high = amount_edge(below), amount_edge(below + 1)
    upper = round(min(max((amount - low) / (high - low), 0.0), 1.0) * _PARTS) / _PARTS
    return (below, 1.0 - upper), (below + 1, upper)


def amount_edge(number: int) -> float:
    """Return the amount of an edge."""
    return 0.0 if number == 0 else math.exp((number - 1) * AMOUNT_STEP)


def amount_ceiling(largest: float) -> float:
    """Return the highest edge that amounts up to this one, which is at least 1, can count at."""
    return amount_edge(2 + math.floor(math.log(largest) / AMOUNT_STEP))


def time_percentile(counts: Mapping[int, float], share: float) -> float | None:
    """Return a percentile by the nearest-rank method, in seconds; None if nothing was counted.

    The geometric middle of the bucket stands for its times.

    share: percent of the times that do not exceed the result, 0 to 100.
    """
    total = sum(counts.values())
    if total <= 0:
        return None
    rank = max(1, math.ceil(total * share / 100))
    seen = 0.0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            return math.exp((bucket + 0.5) * TIME_STEP)
    raise AssertionError("the ranks of a histogram end at its total")
