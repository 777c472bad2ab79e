"""Compares methods of token reduction: the accuracy, visual tokens and times of each, on the same questions.

Every question is answered under every setting, so that two settings are compared question by question
(`score.PairedCounts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from fovea.core.measure import percentile
from fovea.core.media import AUTO
from fovea.core.types import StageTimings
from fovea.evaluation.scenes import DETAIL_KINDS
from fovea.evaluation.score import PairedCounts, wilson

DETAILS, OTHERS, ALL = "small details", "others", "all"
GROUPS = (DETAILS, OTHERS, ALL)
SHARES = (0.75, 0.5, 0.25)
RELEVANCE = "relevance"
Keep = float | Literal["auto"]
"""The share of an image's tokens that is kept, or `AUTO`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How images are reduced in one run over the questions.

    method: name of the method of token reduction; None: images keep all of their tokens.
    keep: share of each image's tokens that is kept, in (0, 1]; "auto": as many as the question needs, with
        the method `relevance`.
    """

    method: str | None = None
    keep: Keep = 1.0

    @property
    def name(self) -> str:
        """Name in reports: "full", or method and share."""
        if self.method is None:
            return "full"
        return f"{self.method} {self.keep if self.keep == AUTO else format(self.keep, 'g')}"


FULL = Setting()


def settings(methods: Sequence[str], shares: Sequence[float] = SHARES) -> tuple[Setting, ...]:
    """`FULL`, then every method at every share, without duplicates."""
    reduced = (Setting(method, keep) for method in methods for keep in shares)
    return tuple(dict.fromkeys((FULL, *reduced)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers to one question under all settings.

    kind: the question's kind.
    right: whether the answer was right, for each setting in order.
    tokens: visual tokens of the question, for each setting in order.
    """

    kind: str
    right: tuple[bool, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Accuracy of one setting on a kind or group of questions.

    group: name of the kind or group.
    cases, correct: how many questions there are, and how many answers are right.
    low, high: 95% interval of the accuracy (Wilson).
    tokens: mean number of visual tokens per question.
    """

    group: str
    cases: int
    correct: int
    low: float
    high: float
    tokens: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.cases


@dataclass(frozen=True, slots=True)
class MedianTimes:
    """Medians over requests that ran alone, with empty caches. Times are in seconds.

    requests: how many there were.
    tokens: visual tokens.
    ttft: time to the first token.
    preprocess, encode, prefill: time in each stage.
    compute: preprocess, encode and prefill together, which is all work up to the first token; the choice of
        tokens is part of it.
    """

    requests: int
    tokens: float
    ttft: float
    preprocess: float
    encode: float
    prefill: float
    compute: float

    @classmethod
    def from_requests(cls, tokens: Sequence[int], timings: Sequence[StageTimings]) -> MedianTimes:
        """The medians over at least one request. tokens, timings: of each request."""
        names = ("ttft", "preprocess", "encode", "prefill")
        stages = {name: [getattr(timing, name) for timing in timings] for name in names}
        stages["compute"] = [timing.preprocess + timing.encode + timing.prefill for timing in timings]
        medians = {name: percentile(sorted(values), 50) for name, values in stages.items()}
        return cls(len(timings), percentile(sorted(tokens), 50), **medians)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two settings, compared on the questions of a group.

    counts: questions by which of the two settings answered them right.
    """

    group: str
    first: Setting
    second: Setting
    counts: PairedCounts


@dataclass(frozen=True, slots=True)
class Sweep:
    """All measurements of one comparison of methods.

    settings: in the order in which they are reported.
    outcomes: one per question.
    times: one per setting, in their order.
    timed_on: description of the requests that were timed, for the report.
    """

    settings: tuple[Setting, ...]
    outcomes: tuple[Outcome, ...]
    times: tuple[MedianTimes, ...]
    timed_on: str

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the questions, in order of appearance."""
        return tuple(sorted({outcome.kind for outcome in self.outcomes}, key=self._place))

    def rivals(self, setting: Setting) -> tuple[Setting, ...]:
        """The settings with other methods at the same share."""
        return tuple(
            other
            for other in self.settings
            if other.method not in (None, setting.method) and other.keep == setting.keep
        )

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups to report: all of GROUPS if questions belong to both parts, else only ALL."""
        parts = {_group(outcome.kind) for outcome in self.outcomes}
        return GROUPS if len(parts) > 1 else (ALL,)

    def score(self, setting: Setting, group: str = ALL) -> Score:
        """Accuracy and tokens of a setting. group: a kind, or one of GROUPS, that has questions."""
        place, members = self.settings.index(setting), self._members(group)
        correct = sum(outcome.right[place] for outcome in members)
        tokens = sum(outcome.tokens[place] for outcome in members) / len(members)
        return Score(group, len(members), correct, *wilson(correct, len(members)), tokens)

    def time(self, setting: Setting) -> MedianTimes:
        """The times of a setting."""
        return self.times[self.settings.index(setting)]

    def compare(self, first: Setting, second: Setting, group: str = ALL) -> Comparison:
        """Compare two settings. group: as in `score`."""
        members = self._members(group)
        answers = (
            [outcome.right[place] for outcome in members]
            for place in map(self.settings.index, (first, second))
        )
        return Comparison(group, first, second, PairedCounts.from_answers(*answers))

    @property
    def pairs(self) -> tuple[tuple[Setting, Setting], ...]:
        """The pairs to report: every setting with `FULL`, and relevance with other methods at its share."""
        mine = [setting for setting in self.settings if setting.method == RELEVANCE]
        return (
            *((setting, FULL) for setting in self.settings if setting != FULL),
            *((setting, other) for setting in mine for other in self.rivals(setting)),
        )

    def body(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "timed_on": self.timed_on,
            "settings": [self._setting(setting) for setting in self.settings],
            "comparisons": [
                _comparison(self.compare(*pair, group)) for pair in self.pairs for group in self.groups
            ],
        }

    def _setting(self, setting: Setting) -> dict[str, Any]:
        scores = [self.score(setting, group) for group in (*self.kinds, *self.groups)]
        times = asdict(self.time(setting))
        seconds = [field.name for field in fields(MedianTimes) if field.name not in ("requests", "tokens")]
        return {
            "name": setting.name,
            "method": setting.method,
            "keep": setting.keep,
            "scores": [{**asdict(score), "accuracy": score.accuracy} for score in scores],
            "timed": {
                "requests": times["requests"],
                "tokens": times["tokens"],
                **{f"{name}_ms": round(1e3 * times[name], 3) for name in seconds},
            },
        }

    def _members(self, group: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if group in (outcome.kind, ALL, _group(outcome.kind))]

    def _place(self, kind: str) -> int:
        return next(place for place, outcome in enumerate(self.outcomes) if outcome.kind == kind)


def _group(kind: str) -> str:
    return DETAILS if kind in DETAIL_KINDS else OTHERS


def _comparison(comparison: Comparison) -> Mapping[str, Any]:
    counts = comparison.counts
    low, high = counts.interval
    pair = {"first": comparison.first.name, "second": comparison.second.name}
    interval = {"difference": counts.difference, "low": low, "high": high, "chance": counts.p_value}
    return {"group": comparison.group, **pair, **asdict(counts), **interval}
