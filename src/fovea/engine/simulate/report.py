"""What came of a simulated run: percentiles per class of request, and what the machine did."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fovea.core.percentile import percentile

KINDS = ("text", "cached image", "new image")
SHARES = (50, 90, 99)


@dataclass(slots=True)
class Record:
    """One request as it was served. Times on the virtual clock, in seconds.

    kind: "text"; "new image" when it waited for the encoder; "cached image" when it had images and did not.
    reason: "length" when it got its whole answer, "timeout", or "refused": by the length of the queue or its own.
    """

    arrival: float
    kind: str = "text"
    admitted: float | None = None
    tokens: list[float] = field(default_factory=list)
    ended: float | None = None
    reason: str = ""
    passed: int = 0

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]

    def good(self, ttft_s: float, itl_s: float) -> bool:
        """Whether it got its whole answer, the first token in time and the others fast enough in the mean."""
        if self.reason != "length" or self.tokens[0] - self.arrival > ttft_s:
            return False
        return self.tokens[-1] - self.tokens[0] <= itl_s * (len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles by nearest rank, in milliseconds; nan of nothing."""

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
    """requests: of the class; finished: with their whole answer.

    itl: over all gaps. worst_gap: over requests, the longest gap of each: one stall in a long answer hides in the former.
    queue: arrival to the first computed token. good: share within the bounds. gaps_within: share of gaps within the ITL bound.
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

    @classmethod
    def of(cls, records: Sequence[Record], ttft_s: float, itl_s: float) -> ClassReport:
        whole = [record for record in records if record.reason == "length"]
        begun = [record for record in records if record.tokens]
        gaps = [gap for record in begun for gap in record.gaps]
        admitted = [(r.admitted, r.arrival) for r in records if r.admitted is not None]
        return cls(
            requests=len(records),
            finished=len(whole),
            ttft=Spread.of(record.tokens[0] - record.arrival for record in begun),
            itl=Spread.of(gaps),
            worst_gap=Spread.of(max(record.gaps) for record in begun if len(record.tokens) > 1),
            end_to_end=Spread.of(record.tokens[-1] - record.arrival for record in whole),
            queue=Spread.of(at - arrival for at, arrival in admitted),
            good=_share(sum(record.good(ttft_s, itl_s) for record in records), len(records)),
            gaps_within=_share(sum(gap <= itl_s for gap in gaps), len(gaps)),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """seconds: virtual, from 0 to the last event. busy: share of them in which a step ran.

    tokens_per_s, requests_per_s: output tokens and whole answers. goodput: answers per second within the bounds.
    prefix_hits: share of prompt tokens whose KV was found. encoder_hits: share of lookups in the encoder cache that found
        something; an image whose KV is found is not looked up. images_spared: share of images asked for, not encoded anew.
    most_passed: how often the unluckiest request was passed by a later one.
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
        """For JSON: what could not be measured is null."""
        values: dict[str, Any] = _plain(asdict(self))
        return values


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
