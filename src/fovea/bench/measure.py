"""Measured requests, and figures over many of them: percentiles, rates, and the number of good answers."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fovea.core.measure import percentile


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A chat request that is not sent yet.

    messages: the conversation, as JSON values of OpenAI's API.
    max_tokens: length of the answer. The answer has exactly this length where the server knows `ignore_eos`.
    label: class of requests in which this one is counted.
    images: number of images in the request.
    timeout: seconds after which this request is given up; None: the timeout of the run.
    priority: smaller is served first; 0 is not sent.
    salt: `cache_salt`, an extension of Fovea and vLLM: requests share caches only if their salts are equal;
        "" is not sent.
    """

    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int
    label: str = "all"
    images: int = 0
    timeout: float | None = None
    priority: int = 0
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a request has no complete answer.

    kind: the class by which errors are counted: "http 429" (any status), "timeout", "unreachable",
        "broken stream", "no stream", "bad answer", "empty answer", "short stream", or "left" (the client
        closed the stream on purpose).
    text: the details, in the server's words where it sent any.
    """

    kind: str
    text: str


@dataclass(slots=True)
class Sample:
    """The measurements of one request. All times are seconds on one monotonic clock.

    due_at: when the request was to be sent; every latency counts from here.
    label, images: as in BenchRequest.
    requested_tokens: length of the answer that was requested.
    sent_at: when the request was really sent.
    events: when each piece of text arrived. Pieces that arrive in one read have one time.
    ended_at: when the request was over, with or without success.
    tokens, prompt_tokens, image_tokens, cached_tokens: counts from the server's usage; None where it sent
        none.
    unreduced_tokens: tokens that its images would have if none were left out; None: the server does not say.
    finish_reason: the server's reason for the end of the answer; "" without one.
    text_pieces: the text of the answer, one entry per event.
    failure: why there is no complete answer; None after success.
    """

    due_at: float
    label: str = "all"
    images: int = 0
    requested_tokens: int = 0
    sent_at: float = math.nan
    events: list[float] = field(default_factory=list)
    ended_at: float = math.nan
    tokens: int | None = None
    prompt_tokens: int | None = None
    image_tokens: int | None = None
    cached_tokens: int | None = None
    unreduced_tokens: int | None = None
    finish_reason: str = ""
    text_pieces: list[str] = field(default_factory=list, repr=False)
    failure: Failure | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the answer is complete."""
        return self.failure is None

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer: the server's count, or the number of events where it sent no count."""
        return len(self.events) if self.tokens is None else self.tokens

    @property
    def ttft(self) -> float:
        """Seconds from when the request was due to the first piece of text; nan without text."""
        return self.events[0] - self.due_at if self.events else math.nan

    @property
    def end_to_end(self) -> float:
        """Seconds from when the request was due to its end."""
        return self.ended_at - self.due_at

    @property
    def send_delay(self) -> float:
        """Seconds by which the load generator itself sent the request too late."""
        return self.sent_at - self.due_at

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive events."""
        return [b - a for a, b in zip(self.events, self.events[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; nan for fewer than two tokens or events."""
        if self.output_tokens < 2 or len(self.events) < 2:
            return math.nan
        return (self.events[-1] - self.events[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of durations by nearest rank, in milliseconds; nan if there are no values.

    count: number of values.
    """

    count: int
    p50: float
    p90: float
    p95: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread:
        """The percentiles of durations in seconds. Values that are nan are left out."""
        values = sorted(value for value in seconds if not math.isnan(value))
        return cls(len(values), *(percentile(values, percent) * 1e3 for percent in (50, 90, 95, 99, 100)))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds in milliseconds within which an answer counts as good; None: no bound.

    ttft_ms: time to first token.
    tpot_ms: mean time per token after the first.
    gap_ms: the longest gap between two events.
    end_to_end_ms: time of the whole answer.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    gap_ms: float | None = None
    end_to_end_ms: float | None = None

    def good(self, sample: Sample) -> bool:
        """Whether the answer is complete and within every bound.

        A value that does not exist, such as the gaps of a one-token answer, breaks no bound.
        """
        if not sample.succeeded:
            return False
        figures = (
            (sample.ttft, self.ttft_ms),
            (sample.tpot, self.tpot_ms),
            (max(sample.gaps, default=math.nan), self.gap_ms),
            (sample.end_to_end, self.end_to_end_ms),
        )
        return not any(limit is not None and value * 1e3 > limit for value, limit in figures)


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a workload.

    samples: its measured requests.
    values: other figures by name, for example `stall_ms`.
    """

    samples: Sequence[Sample]
    values: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds from when the first request was due to the end of the last one."""
        if not self.samples:
            return 0.0
        return max(s.ended_at for s in self.samples) - min(s.due_at for s in self.samples)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of complete answers per second of the round."""
        return _ratio(sum(sample.output_tokens for sample in self.samples if sample.succeeded), self.seconds)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures over the rounds of one workload.

    Rates are per second of all rounds together. Latencies count from when a request was due, over complete
    answers.

    requests, failed: number of all requests, and of those without a complete answer.
    errors: kind of failure to (number, text of the first one).
    seconds: duration of all rounds together.
    requests_per_s: complete answers per second.
    tokens: output tokens of complete answers, from the server's usage where it sent any.
    events: pieces of text in which these arrived.
    counted: whether `tokens` comes from usage for every answer.
    tokens_per_s: output tokens per second; tokens_per_s_low, tokens_per_s_high: in the slowest and the
        fastest round.
    decode_per_s: tokens per second of one stream after its first token; median over requests.
    ttft: time to first token.
    gap: time between events, over all of them.
    longest_gap: the longest gap of each request.
    tpot: mean time per token of each request after its first.
    end_to_end: time of the whole answer.
    good, goodput: share of requests within the bounds; such requests per second.
    short: complete answers with fewer tokens than requested.
    late: delay with which the load generator sent requests.
    prompt_tokens, cached_tokens, image_tokens: sums over complete answers; None where usage does not contain
        them.
    images: images in the prompts of complete answers.
    unreduced_tokens: image tokens of complete answers if none had been left out; None if unknown.
    values: other figures by name; median over the rounds.
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
    unreduced_tokens: int | None
    values: dict[str, float]

    @classmethod
    def of(cls, rounds: Sequence[Round], bounds: Bounds) -> Summary:
        """Summarize rounds. bounds: what an answer must keep to be good."""
        samples = [sample for part in rounds for sample in part.samples]
        answers = [sample for sample in samples if sample.succeeded]
        seconds = sum(part.seconds for part in rounds)
        speeds = [part.tokens_per_s for part in rounds]
        tokens = sum(sample.output_tokens for sample in answers)
        tpot = Spread.of(sample.tpot for sample in answers)
        good = sum(bounds.good(sample) for sample in samples)
        return cls(
            requests=len(samples),
            failed=len(samples) - len(answers),
            errors=_errors(samples),
            seconds=seconds,
            requests_per_s=_ratio(len(answers), seconds),
            tokens=tokens,
            events=sum(len(sample.events) for sample in answers),
            counted=all(sample.tokens is not None for sample in answers),
            tokens_per_s=_ratio(tokens, seconds),
            tokens_per_s_low=min(speeds, default=math.nan),
            tokens_per_s_high=max(speeds, default=math.nan),
            decode_per_s=_ratio(1e3, tpot.p50),
            ttft=Spread.of(sample.ttft for sample in answers),
            gap=Spread.of(gap for sample in answers for gap in sample.gaps),
            longest_gap=Spread.of(max(sample.gaps, default=math.nan) for sample in answers),
            tpot=tpot,
            end_to_end=Spread.of(sample.end_to_end for sample in answers),
            good=_ratio(good, len(samples)),
            goodput=_ratio(good, seconds),
            short=sum(sample.output_tokens < sample.requested_tokens for sample in answers),
            late=Spread.of(sample.send_delay for sample in samples),
            prompt_tokens=_total(sample.prompt_tokens for sample in answers),
            cached_tokens=_total(sample.cached_tokens for sample in answers),
            image_tokens=_total(sample.image_tokens for sample in answers),
            images=sum(sample.images for sample in answers),
            unreduced_tokens=_total(sample.unreduced_tokens for sample in answers),
            values=_medians(rounds),
        )

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON values. A figure that could not be measured is None."""
        figures: dict[str, Any] = without_nan(asdict(self))
        return figures


def by_label(rounds: Sequence[Round]) -> dict[str, list[Round]]:
    """Split rounds by the label of their requests: for each label, all rounds with only its samples."""
    labels = dict.fromkeys(sample.label for part in rounds for sample in part.samples)
    return {
        label: [Round([sample for sample in part.samples if sample.label == label]) for part in rounds]
        for label in labels
    }


def without_nan(value: Any) -> Any:
    """A copy that JSON can hold: numbers that are not finite become None, tuples become lists."""
    if isinstance(value, dict):
        return {name: without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _errors(samples: Sequence[Sample]) -> dict[str, tuple[int, str]]:
    failures = [sample.failure for sample in samples if sample.failure is not None]
    counts = Counter(failure.kind for failure in failures)
    return {kind: (count, next(f.text for f in failures if f.kind == kind)) for kind, count in counts.items()}


def _total(values: Iterable[int | None]) -> int | None:
    """The sum of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _medians(rounds: Sequence[Round]) -> dict[str, float]:
    names = dict.fromkeys(name for part in rounds for name in part.values)
    return {
        name: statistics.median(part.values[name] for part in rounds if name in part.values) for name in names
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
