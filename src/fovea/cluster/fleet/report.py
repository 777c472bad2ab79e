"""The figures of a simulated fleet, counted while it runs, so that memory does not grow with the requests."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from fovea.cluster.fleet.replica import Replica, Request
from fovea.engine.simulate.run import Bounds

OUTCOMES = ("good", "late", "refused", "failed")
"""How a request ends.

good: within both targets. late: answered, but not within them. refused: by a full queue, or because nothing
was left to ask. failed: its replica went away after the first byte, or too often before it.
"""


@dataclass(frozen=True, slots=True)
class Moment:
    """The fleet in one interval of time.

    at: its end in seconds. outcomes: how many requests ended in it, by OUTCOMES.
    replicas: that answered at its end.
    """

    at: float
    outcomes: dict[str, int]
    replicas: int


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """The figures of one run.

    requests: that clients sent.
    seconds: until the last conversation began. Rates, hours and costs are those of this time; afterwards
        the load ends slowly.
    outcomes: how the requests ended, by OUTCOMES. good: good answers in the time above.
    ttft_p50_s, ttft_p99_s: times to the first token of all that were answered. itl_p50_s, itl_p99_s: the same
        for the mean time between the tokens of an answer.
    tokens_per_s: of all answers.
    encoder_hits: share of requests with an image for which no image was encoded.
    prefix_hits: share of all tokens of prompts that the prefix caches had.
    images_encoded: how many. retries: attempts after the first, of all requests.
    replica_hours: of all replicas and encoders, from the start of their loading on.
    most_replicas: the most at a time, starting ones included.
    price_per_h: US dollars of one replica and hour; None: not known.
    timeline: the run in intervals.
    """

    requests: int
    seconds: float
    outcomes: dict[str, int]
    good: int
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    tokens_per_s: float
    encoder_hits: float
    prefix_hits: float
    images_encoded: int
    retries: int
    replica_hours: float
    most_replicas: int
    price_per_h: float | None
    timeline: tuple[Moment, ...] = ()

    @property
    def goodput(self) -> float:
        """Good answers per second."""
        return self.good / self.seconds if self.seconds else math.nan

    def share(self, outcome: str) -> float:
        """Share of all requests that ended so."""
        return self.outcomes[outcome] / self.requests if self.requests else math.nan

    @property
    def cost(self) -> float | None:
        """US dollars of all replicas and encoders; None: no price is known."""
        return None if self.price_per_h is None else self.price_per_h * self.replica_hours

    @property
    def cost_per_1000(self) -> float | None:
        """US dollars per 1,000 good answers; None: no price is known, or none was good."""
        return None if self.cost is None or not self.good else 1000 * self.cost / self.good

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as values of JSON, without the timeline."""
        values = {name: value for name, value in asdict(self).items() if name != "timeline"}
        own = {"goodput": self.goodput, "cost": self.cost, "cost_per_1000": self.cost_per_1000}
        return values | own


class Tally:
    """Counts what happens while a fleet runs.

    recent: good answers and all answers since the scaler looked last.
    until: time at which the last conversation began; infinite before.
    """

    def __init__(self, bounds: Bounds, interval_s: float) -> None:
        self._bounds = bounds
        self._interval_s = interval_s
        self._ttft, self._itl = array("f"), array("f")
        self._with_image = self._encoded_for = self._tokens = 0
        self._intervals: dict[int, Counter[str]] = {}
        self._replicas: dict[int, int] = {}
        self.outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self.requests = self.retries = 0
        self.recent = [0, 0]
        self.until = math.inf
        self._good = 0

    def answered(self, request: Request) -> None:
        """Count a request whose answer is complete."""
        ttft = request.first - request.arrival
        itl = (request.last - request.first) / (request.output - 1) if request.output > 1 else 0.0
        good = ttft <= self._bounds.ttft_s and itl <= self._bounds.itl_s
        self._ttft.append(ttft)
        self._itl.append(itl)
        if request.last <= self.until:
            self._tokens += request.output
            self._good += good
        if request.image:
            self._with_image += 1
            self._encoded_for += request.fresh
        self.recent[0] += good
        self.recent[1] += 1
        self._end("good" if good else "late", request.last)

    def lost(self, outcome: str, now: float) -> None:
        """Count a request that ends without a complete answer."""
        self._end(outcome, now)

    def replicas(self, now: float, number: int) -> None:
        """Note how many replicas answer now."""
        self._replicas[int(now // self._interval_s)] = number

    def _end(self, outcome: str, now: float) -> None:
        self.outcomes[outcome] += 1
        self._intervals.setdefault(int(now // self._interval_s), Counter())[outcome] += 1

    def figures(
        self, replicas: list[Replica], images: int, hours: float, most: int, price: float | None
    ) -> FleetFigures:
        """Return the figures of a run that has ended. images: that were encoded."""
        ttft, itl = sorted(self._ttft), sorted(self._itl)
        seconds = self.until
        prompts = sum(one.prompt_tokens for one in replicas)
        return FleetFigures(
            requests=self.requests,
            seconds=seconds,
            outcomes=dict(self.outcomes),
            good=self._good,
            ttft_p50_s=_at(ttft, 0.5),
            ttft_p99_s=_at(ttft, 0.99),
            itl_p50_s=_at(itl, 0.5),
            itl_p99_s=_at(itl, 0.99),
            tokens_per_s=self._tokens / seconds if seconds else math.nan,
            encoder_hits=1 - self._encoded_for / self._with_image if self._with_image else math.nan,
            prefix_hits=sum(one.cached_tokens for one in replicas) / prompts if prompts else math.nan,
            images_encoded=images,
            retries=self.retries,
            replica_hours=hours,
            most_replicas=most,
            price_per_h=price,
            timeline=self._timeline(),
        )

    def _timeline(self) -> tuple[Moment, ...]:
        moments, number = [], 0
        for place in range(max(self._intervals, default=-1) + 1):
            number = self._replicas.get(place, number)
            counted = self._intervals.get(place, Counter())
            at = (place + 1) * self._interval_s
            moments.append(Moment(at, {name: counted[name] for name in OUTCOMES}, number))
        return tuple(moments)


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan
