"""What came of many requests: percentiles, rates, and how many were good."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fovea.bench.sample import Sample
from fovea.core.percentile import percentile


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles by nearest rank, in milliseconds; nan of nothing. count: of how many values."""

    count: int
    p50: float
    p90: float
    p95: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread:
        values = sorted(value for value in seconds if not math.isnan(value))
        return cls(len(values), *(percentile(values, share) * 1e3 for share in (50, 90, 95, 99, 100)))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request must keep to be good, in milliseconds; none: it does not matter. tpot_ms: mean per token after the
    first. gap_ms: its longest gap."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    gap_ms: float | None = None
    end_to_end_ms: float | None = None

    def good(self, sample: Sample) -> bool:
        """Whether it was answered to its end within every bound. A bound on what an answer is too short to have is kept."""
        if not sample.whole:
            return False
        measured = (
            (sample.ttft, self.ttft_ms),
            (sample.tpot, self.tpot_ms),
            (max(sample.gaps, default=math.nan), self.gap_ms),
            (sample.end_to_end, self.end_to_end_ms),
        )
        return not any(limit is not None and value * 1e3 > limit for value, limit in measured)


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that belong together. values: what else was measured, by name, e.g. the longest stall in milliseconds."""

    samples: Sequence[Sample]
    values: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From when the first was due to the end of the last."""
        if not self.samples:
            return 0.0
        return max(s.ended for s in self.samples) - min(s.scheduled for s in self.samples)

    @property
    def tokens_per_s(self) -> float:
        return _ratio(sum(sample.output for sample in self.samples if sample.whole), self.seconds)


@dataclass(frozen=True, slots=True)
class Summary:
    """Rates are per second of the rounds together; latencies count from when a request was due, and are of whole answers.

    failed: of `requests`; errors: kind to (how many, the first one's text).
    tokens: of whole answers, by the server's usage; events: pieces of text that they came in; counted: whether usage said it.
    tokens_per_s_low, tokens_per_s_high: of the slowest and the fastest round. decode_per_s: tokens per second of one stream
    after its first, median over requests.
    gap: between events, over all of them; longest_gap: of each request; tpot: mean per token after the first.
    good: share of requests within the bounds; goodput: such requests per second.
    short: whole answers with fewer tokens than were asked for.
    late: how late requests left here. values: median over the rounds.
    image_tokens, images: of the whole answers' prompts; image_tokens is none where usage does not say them.
    """

    requests: int
    failed: int
    errors: dict[str, tuple[int, str]]
    seconds: float
    requests_per_s: float
    tokens: int
    events: int
    counted: bool
    tokens_per_s: float
    tokens_per_s_low: float
    tokens_per_s_high: float
    decode_per_s: float
    ttft: Spread
    gap: Spread
    longest_gap: Spread
    tpot: Spread
    end_to_end: Spread
    good: float
    goodput: float
    short: int
    late: Spread
    prompt_tokens: int | None
    cached_tokens: int | None
    image_tokens: int | None
    images: int
    values: dict[str, float]

    @classmethod
    def of(cls, rounds: Sequence[Round], bounds: Bounds) -> Summary:
        samples = [sample for part in rounds for sample in part.samples]
        whole = [sample for sample in samples if sample.whole]
        seconds = sum(part.seconds for part in rounds)
        speeds = [part.tokens_per_s for part in rounds]
        tokens = sum(sample.output for sample in whole)
        tpot = Spread.of(sample.tpot for sample in whole)
        good = sum(bounds.good(sample) for sample in samples)
        return cls(
            requests=len(samples),
            failed=len(samples) - len(whole),
            errors=_errors(samples),
            seconds=seconds,
            requests_per_s=_ratio(len(whole), seconds),
            tokens=tokens,
            events=sum(len(sample.events) for sample in whole),
            counted=all(sample.tokens is not None for sample in whole),
            tokens_per_s=_ratio(tokens, seconds),
            tokens_per_s_low=min(speeds, default=math.nan),
            tokens_per_s_high=max(speeds, default=math.nan),
            decode_per_s=_ratio(1e3, tpot.p50),
            ttft=Spread.of(sample.ttft for sample in whole),
            gap=Spread.of(gap for sample in whole for gap in sample.gaps),
            longest_gap=Spread.of(max(sample.gaps, default=math.nan) for sample in whole),
            tpot=tpot,
            end_to_end=Spread.of(sample.end_to_end for sample in whole),
            good=_ratio(good, len(samples)),
            goodput=_ratio(good, seconds),
            short=sum(sample.output < sample.wanted for sample in whole),
            late=Spread.of(sample.late for sample in samples),
            prompt_tokens=_total(sample.prompt_tokens for sample in whole),
            cached_tokens=_total(sample.cached_tokens for sample in whole),
            image_tokens=_total(sample.image_tokens for sample in whole),
            images=sum(sample.images for sample in whole),
            values=_medians(rounds),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what could not be measured is null."""
        found: dict[str, Any] = plain(asdict(self))
        return found


def by_label(rounds: Sequence[Round]) -> dict[str, list[Round]]:
    """The rounds of each class of requests."""
    labels = dict.fromkeys(sample.label for part in rounds for sample in part.samples)
    return {
        label: [Round([sample for sample in part.samples if sample.label == label]) for part in rounds]
        for label in labels
    }


def plain(value: Any) -> Any:
    """As JSON can write it: nan becomes null."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _errors(samples: Sequence[Sample]) -> dict[str, tuple[int, str]]:
    failures = [sample.failure for sample in samples if sample.failure is not None]
    counts = Counter(failure.kind for failure in failures)
    return {kind: (count, next(f.text for f in failures if f.kind == kind)) for kind, count in counts.items()}


def _total(values: Iterable[int | None]) -> int | None:
    """The sum, unless nobody said anything."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _medians(rounds: Sequence[Round]) -> dict[str, float]:
    names = dict.fromkeys(name for part in rounds for name in part.values)
    return {
        name: statistics.median(part.values[name] for part in rounds if name in part.values) for name in names
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
