"""The same questions answered with all visual tokens and with fewer, by several methods: accuracy, tokens and times of each.

Every question is asked under every setting, so that two settings are compared question by question (`paired`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fovea.core.percentile import percentile
from fovea.core.types import StageTimings
from fovea.evaluation.pairs import Paired
from fovea.evaluation.scenes import DETAIL_KINDS
from fovea.evaluation.score import wilson

DETAILS, OTHERS, ALL = "small details", "others", "all"
GROUPS = (DETAILS, OTHERS, ALL)
SHARES = (0.75, 0.5, 0.25)
RELEVANCE = "relevance"


@dataclass(frozen=True, slots=True)
class Setting:
    """What every image of a question is seen with. method: None for all of its tokens. keep: the share of them."""

    method: str | None = None
    keep: float = 1.0

    @property
    def name(self) -> str:
        return "full" if self.method is None else f"{self.method} {self.keep:g}"


FULL = Setting()


def settings(methods: Sequence[str], shares: Sequence[float] = SHARES) -> tuple[Setting, ...]:
    """All tokens first, then every method at every share, each once."""
    chosen = (Setting(method, keep) for method in methods for keep in shares)
    return tuple(dict.fromkeys((FULL, *chosen)))


@dataclass(frozen=True, slots=True)
class Marks:
    """One question under every setting. right, tokens: in the order of the settings; tokens are visual ones."""

    kind: str
    right: tuple[bool, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Accuracy of a kind or group with its 95% Wilson interval; mean visual tokens per question."""

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
class Timed:
    """Medians over requests that were asked alone, with nothing cached. Seconds; tokens are visual ones.

    compute: preprocess, encode and prefill together: all work up to the first token, choosing included.
    """

    requests: int
    tokens: float
    ttft: float
    preprocess: float
    encode: float
    prefill: float
    compute: float

    @classmethod
    def of(cls, tokens: Sequence[int], timings: Sequence[StageTimings]) -> Timed:
        """Of one request at least, each with its tokens."""
        names = ("ttft", "preprocess", "encode", "prefill")
        stages = {name: [getattr(timing, name) for timing in timings] for name in names}
        stages["compute"] = [timing.preprocess + timing.encode + timing.prefill for timing in timings]
        medians = {name: percentile(sorted(values), 50) for name, values in stages.items()}
        return cls(len(timings), percentile(sorted(tokens), 50), **medians)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`first` less `second`, over the questions of a group."""

    group: str
    first: Setting
    second: Setting
    paired: Paired


@dataclass(frozen=True, slots=True)
class Sweep:
    """marks: one per question. timed: in the order of the settings. timed_on: what was asked for that, in words."""

    settings: tuple[Setting, ...]
    marks: tuple[Marks, ...]
    timed: tuple[Timed, ...]
    timed_on: str

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({mark.kind for mark in self.marks}, key=self._place))

    def rivals(self, setting: Setting) -> tuple[Setting, ...]:
        """Other methods at the same share."""
        return tuple(
            other
            for other in self.settings
            if other.method not in (None, setting.method) and other.keep == setting.keep
        )

    @property
    def groups(self) -> tuple[str, ...]:
        """Those that have questions, and are not the same as all of them."""
        found = {_group(mark.kind) for mark in self.marks}
        return GROUPS if len(found) > 1 else (ALL,)

    def score(self, setting: Setting, group: str = ALL) -> Score:
        """group: a kind, or one of GROUPS, that has questions."""
        place, members = self.settings.index(setting), self._members(group)
        correct = sum(mark.right[place] for mark in members)
        tokens = sum(mark.tokens[place] for mark in members) / len(members)
        return Score(group, len(members), correct, *wilson(correct, len(members)), tokens)

    def time(self, setting: Setting) -> Timed:
        return self.timed[self.settings.index(setting)]

    def compare(self, first: Setting, second: Setting, group: str = ALL) -> Comparison:
        members = self._members(group)
        answers = (
            [mark.right[place] for mark in members] for place in map(self.settings.index, (first, second))
        )
        return Comparison(group, first, second, Paired.of(*answers))

    @property
    def pairs(self) -> tuple[tuple[Setting, Setting], ...]:
        """What is worth comparing: every setting with all tokens, and relevance with every other method at its share."""
        mine = [setting for setting in self.settings if setting.method == RELEVANCE]
        return (
            *((setting, FULL) for setting in self.settings if setting != FULL),
            *((setting, other) for setting in mine for other in self.rivals(setting)),
        )

    def body(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "timed_on": self.timed_on,
            "settings": [self._setting(setting) for setting in self.settings],
            "comparisons": [
                _comparison(self.compare(*pair, group)) for pair in self.pairs for group in self.groups
            ],
        }

    def _setting(self, setting: Setting) -> dict[str, Any]:
        scores = [self.score(setting, group) for group in (*self.kinds, *self.groups)]
        timed = asdict(self.time(setting))
        seconds = [field.name for field in fields(Timed) if field.name not in ("requests", "tokens")]
        return {
            "name": setting.name,
            "method": setting.method,
            "keep": setting.keep,
            "scores": [{**asdict(score), "accuracy": score.accuracy} for score in scores],
            "timed": {
                "requests": timed["requests"],
                "tokens": timed["tokens"],
                **{f"{name}_ms": round(1e3 * timed[name], 3) for name in seconds},
            },
        }

    def _members(self, group: str) -> list[Marks]:
        return [mark for mark in self.marks if group in (mark.kind, ALL, _group(mark.kind))]

    def _place(self, kind: str) -> int:
        return next(place for place, mark in enumerate(self.marks) if mark.kind == kind)


def _group(kind: str) -> str:
    return DETAILS if kind in DETAIL_KINDS else OTHERS


def _comparison(found: Comparison) -> Mapping[str, Any]:
    low, high = found.paired.interval
    return {
        "group": found.group,
        "first": found.first.name,
        "second": found.second.name,
        **asdict(found.paired),
        "difference": found.paired.difference,
        "low": low,
        "high": high,
        "chance": found.paired.chance,
    }
