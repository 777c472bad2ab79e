"""The result of a simulated run: percentiles per class of request, and counters of the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fovea.core.measure import percentile

KINDS = ("text", "cached image", "new image")
SHARES = (50, 90, 99)


@dataclass(slots=True)
class Record:
    """The history of one request. Times are seconds on the virtual clock.

    arrival: when the request arrived.
    kind: "text"; "new image" if it waited for the encoder; "cached image" if it has images and did not wait.
    admitted: when its first token was scheduled.
    tokens: when each token of the answer was ready.
    ended: when it ended.
    reason: "length" if it got its whole answer; "timeout"; "refused" if the queue or the request itself was
        too long.
    times_passed: how many later requests joined before it.
    """

    arrival: float
    kind: str = "text"
    admitted: float | None = None
    tokens: list[float] = field(default_factory=list)
    ended: float | None = None
    reason: str = ""
    times_passed: int = 0

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]

    def good(self, ttft_s: float, itl_s: float) -> bool:
        """Tell whether the request got its whole answer in time.

        ttft_s: limit of the time to the first token.
        itl_s: limit of the mean time per further token.
        """
        if self.reason != "length" or self.tokens[0] - self.arrival > ttft_s:
            return False
        return self.tokens[-1] - self.tokens[0] <= itl_s * (len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles by nearest rank, in milliseconds; NaN without values."""

    p50: float
    p90: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread:
        values = sorted(seconds)
        picked = [percentile(values, share) * 1e3 for share in (*SHARES, 100)]
        return cls(*picked)


@dataclass(frozen=True, slots=True)
class ClassReport:
    """The figures of one class of requests.

    requests: number of requests.
    finished: how many got their whole answer.
    ttft: time to the first token.
    itl: time between tokens, over all gaps.
    worst_gap: the longest gap of each request. It shows a stall that disappears among the gaps of a long
        answer.
    end_to_end: time from arrival to the last token.
    queue: time from arrival to the first scheduled token.
    good: share of requests within the bounds.
    gaps_within: share of gaps within the bound of the time per token.
    firsts_within: share of first tokens within the bound of the time to the first token.
    """

    requests: int
    finished: int
    ttft: Spread
    itl: Spread
    worst_gap: Spread
    end_to_end: Spread
    queue: Spread
    good: float
    gaps_within: float
    firsts_within: float

    @classmethod
    def of(cls, records: Sequence[Record], ttft_s: float, itl_s: float) -> ClassReport:
        whole = [record for record in records if record.reason == "length"]
        answered = [record for record in records if record.tokens]
        gaps = [gap for record in answered for gap in record.gaps]
        admitted = [(r.admitted, r.arrival) for r in records if r.admitted is not None]
        return cls(
            requests=len(records),
            finished=len(whole),
            ttft=Spread.of(record.tokens[0] - record.arrival for record in answered),
            itl=Spread.of(gaps),
            worst_gap=Spread.of(max(record.gaps) for record in answered if len(record.tokens) > 1),
            end_to_end=Spread.of(record.tokens[-1] - record.arrival for record in whole),
            queue=Spread.of(at - arrival for at, arrival in admitted),
            good=_share(sum(record.good(ttft_s, itl_s) for record in records), len(records)),
            gaps_within=_share(sum(gap <= itl_s for gap in gaps), len(gaps)),
            firsts_within=_share(sum(r.tokens[0] - r.arrival <= ttft_s for r in answered), len(answered)),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a whole run.

    seconds: virtual time from 0 to the last event.
    steps: number of steps.
    busy: share of the time in which a step ran.
    tokens_per_s: output tokens per second.
    requests_per_s: whole answers per second.
    goodput: whole answers within the bounds, per second.
    prefix_hits: share of prompt tokens whose KV was cached.
    encoder_hits: share of lookups in the encoder-output cache that were hits. Images whose KV is cached need
        no lookup.
    images_spared: share of requested images that were not encoded again.
    images_encoded: number of encoded images.
    encode_seconds: time that the encoder spent on them.
    preemptions: number of preemptions.
    refused, timeouts: number of requests with that end.
    most_passed: most later requests that joined before one request.
    classes: figures per class of request, and of all requests.
    """

    seconds: float
    steps: int
    busy: float
    tokens_per_s: float
    requests_per_s: float
    goodput: float
    prefix_hits: float
    encoder_hits: float
    images_spared: float
    images_encoded: int
    encode_seconds: float
    preemptions: int
    refused: int
    timeouts: int
    most_passed: int
    classes: dict[str, ClassReport]

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON. Figures without measurements are null."""
        values: dict[str, Any] = _plain(asdict(self))
        return values


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
