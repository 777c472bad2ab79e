"""The sums of one variant, and their histograms. Sums of several processes are added field by field.

A histogram is a mapping of bucket numbers to counts: log-spaced buckets, small, mergeable by addition, and
with a known error. Only buckets with a count exist. Times use buckets that are 1.1% wide (64 per doubling). A
percentile read from them is at most 1.1% wrong. Amounts whose mean matters (cost) use edges that are 9% apart
(8 per doubling), and every amount is divided between the two edges around it, so that the mean of the
histogram is the mean of the amounts: 103 between the edges 100 and 109 counts as two thirds of a 100 and one
third of a 109.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fovea.gateway.usage.prices import NOTHING, Consumption

TIME_STEP = math.log(2) / 64
"""Natural logarithm of the ratio of two edges of times."""
AMOUNT_STEP = math.log(2) / 8
"""Natural logarithm of the ratio of two edges of amounts."""
SHORTEST_S, LONGEST_S = 1e-6, 1e6
"""Times outside of these seconds are counted at the nearer end."""
_PARTS = 1 << 20
_TIMES_PER_LOG = 1 / TIME_STEP
UP, DOWN = 5, 1


class Outcome(NamedTuple):
    """The result of one request.

    latency_s: seconds from its arrival to the last byte of its answer.
    ttft_s: seconds to the first token; None if the answer was not streamed.
    failed: whether the client got an error that was not the client's own.
    consumption: its tokens.
    cost: money, in millionths of the currency of the price table.
    request_id: the name by which it can be rated, see `answer_of`; empty if it cannot.
    """

    latency_s: float
    ttft_s: float | None = None
    failed: bool = False
    consumption: Consumption = NOTHING
    cost: int = 0
    request_id: str = ""


class Statistics:
    """The sums of one variant.

    amounts: sum by field and bucket. Counters have bucket 0. The fields `latency` and `ttft` are histograms
        of successful requests by `time_bucket`, `cost_share` is one of all requests by `amount_shares`, and
        `rating` counts ratings by their value, 1 to 5.

    A failed request has no latency: errors that come at once would make a variant look fast. Their share is
    judged by itself.
    """

    __slots__ = ("amounts",)

    def __init__(self, amounts: Mapping[tuple[str, int], float] | None = None) -> None:
        self.amounts: dict[tuple[str, int], float] = dict(amounts or {})

    def add(self, outcome: Outcome, largest_cost: float) -> None:
        """Count a request. largest_cost: a dearer one counts as this in the comparison of costs."""
        add, used = self._add, outcome.consumption
        add("requests", 0, 1)
        if outcome.failed:
            add("errors", 0, 1)
        else:
            add("latency", time_bucket(outcome.latency_s), 1)
            if outcome.ttft_s is not None:
                add("ttft", time_bucket(outcome.ttft_s), 1)
        if used is not NOTHING:
            add("prompt_tokens", 0, used.prompt_tokens)
            add("visual_tokens", 0, used.visual_tokens)
            add("completion_tokens", 0, used.completion_tokens)
        add("cost", 0, outcome.cost)
        for edge, share in amount_shares(min(outcome.cost, largest_cost)):
            if share:
                add("cost_share", edge, share)

    def merge(self, other: Statistics) -> None:
        """Add the sums of another part of the same variant's requests."""
        for (field, bucket), amount in other.amounts.items():
            self._add(field, bucket, amount)

    def count(self, field: str) -> float:
        """Return a counter."""
        return self.amounts.get((field, 0), 0)

    def histogram(self, field: str) -> dict[int, float]:
        """Return the counts of a histogram by bucket."""
        return {bucket: amount for (name, bucket), amount in self.amounts.items() if name == field and amount}

    def rows(self) -> Iterator[tuple[str, int, float]]:
        """Return field, bucket and sum of everything that is not 0."""
        return ((field, bucket, amount) for (field, bucket), amount in self.amounts.items() if amount)

    @property
    def requests(self) -> int:
        return int(self.count("requests"))

    @property
    def errors(self) -> int:
        return int(self.count("errors"))

    @property
    def error_rate(self) -> float | None:
        """Share of failed requests; None if there were no requests."""
        return self.errors / self.requests if self.requests else None

    @property
    def ratings(self) -> int:
        return int(sum(self.histogram("rating").values()))

    @property
    def rating(self) -> float | None:
        """Mean rating; None if there is none."""
        counts = self.histogram("rating")
        total = sum(counts.values())
        return sum(value * count for value, count in counts.items()) / total if total else None

    def per_request(self, field: str) -> float | None:
        """Return a counter divided by the requests; None if there were none."""
        return self.count(field) / self.requests if self.requests else None

    def percentile(self, field: str, percent: float) -> float | None:
        """Return a percentile of a histogram of times, in seconds; None if it is empty."""
        return time_percentile(self.histogram(field), percent)

    def _add(self, field: str, bucket: int, amount: float) -> None:
        key = (field, bucket)
        self.amounts[key] = self.amounts.get(key, 0) + amount


def time_bucket(seconds: float) -> int:
    """Return the number of the bucket of a time. Bucket 0 begins at 1 s; those of shorter times are negative.

    Raises ValueError for NaN.
    """
    bounded = min(max(seconds, SHORTEST_S), LONGEST_S)
    return math.floor(math.log(bounded) * _TIMES_PER_LOG)


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


def time_percentile(counts: Mapping[int, float], percent: float) -> float | None:
    """Return a percentile by the nearest-rank method, in seconds; None if nothing was counted.

    The geometric middle of the bucket stands for its times.

    percent: part of the times that do not exceed the result, in percent, 0 to 100.
    """
    total = sum(counts.values())
    if total <= 0:
        return None
    rank = max(1, math.ceil(total * percent / 100))
    seen = 0.0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            return math.exp((bucket + 0.5) * TIME_STEP)
    raise AssertionError("the ranks of a histogram end at its total")


def answer_of(tenant: str, request_id: str) -> str:
    """Return the id of an answer for ratings: tenant and request id.

    Clients choose request ids, so two tenants can have the same one. And a tenant that learns a request id
    of another one cannot rate its answer.
    """
    return f"{tenant}\n{request_id}" if tenant else request_id


def rating_of(value: object) -> int | None:
    """Return the rating that a value of JSON means, 1 to 5; None if it is none.

    Accepted are the whole numbers 1 to 5, and `up` and `down`, which are 5 and 1.
    """
    if isinstance(value, str):
        return {"up": UP, "down": DOWN}.get(value)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 5:
        return value
    return None
