"""Decides the detail level of images whose request says `detail: auto`.

A policy reads the question, and load may lower the level. A request that names a level or pixels gets what it
names. Every decision carries its reason, which the answer reports.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from fovea.core.media import AUTO, LEVELS, Level, PixelBudget, VisualTokens
from fovea.engine.visual_budget.methods import METHODS, parse_visual_tokens, resolve_preset

if TYPE_CHECKING:  # the settings import this package, to check names of methods
    from fovea.engine.config.schedule import VisualSettings

SHARES_UNDER_LOAD = 0.5, 0.25
"""Shares of the usual visual tokens that images keep after one and two steps down."""


@dataclass(frozen=True, slots=True)
class LevelDecision:
    """A detail level, and why it was chosen."""

    level: Level
    reason: str


class DetailPolicy(Protocol):
    """Decides the level of images with `detail: auto`."""

    def choose(self, question: str) -> LevelDecision:
        """Decide by the question.

        question: the user's text of all turns; empty if an image is encoded before any question is known.
        """
        ...


class FullDetail:
    """Always the model's own resolution. It loses nothing, so it is the default."""

    def choose(self, question: str) -> LevelDecision:
        return LevelDecision("high", "auto is the model's own resolution here")


class KeywordDetail:
    """Decides by English words of the question.

    The level is high for text and small things, medium for counting and places, and low otherwise.

    It reads the words of all turns, so the level never falls during a conversation, and the conversation's KV
    stays valid.
    """

    high = (
        "detail",
        "small",
        "tiny",
        "text",
        "read",
        "word",
        "letter",
        "character",
        "digit",
        "number",
        "written",
    )
    medium = ("count", "many", "where", "position", "left", "right", "above", "below", "between", "compare")

    def __init__(self) -> None:
        self._patterns: tuple[tuple[Level, re.Pattern[str]], ...] = (
            ("high", _any_of(self.high)),
            ("medium", _any_of(self.medium)),
        )

    def choose(self, question: str) -> LevelDecision:
        if not question.strip():
            return LevelDecision("high", "there is no question yet")
        for level, words in self._patterns:
            match = words.search(question)
            if match:
                return LevelDecision(level, f"the question says {match.group().lower()!r}")
        return LevelDecision("low", "no word of the question needs a higher level")


def _any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern for whole words with the usual endings: "reading" and "details", but not "thread"."""
    return re.compile(rf"\b(?:{'|'.join(words)})(?:s|ed|er|est|ing)?\b", re.IGNORECASE)


_TEXT = _any_of(("text", "read", "word", "letter", "character", "digit", "written", "code", "say"))


def asks_for_text(question: str) -> bool:
    """Whether a question in English is about text in an image."""
    return _TEXT.search(question) is not None


DETAIL_POLICIES: dict[str, type[DetailPolicy]] = {"full": FullDetail, "keywords": KeywordDetail}


@dataclass(frozen=True, slots=True)
class DetailRule:
    """Turns `detail: auto` into a level.

    Under load, images lose a level, or some of their visual tokens. The load is the share of the engine's
    room that the requests in flight may come to use (`engine.request.admission`).

    policy: decides the level without load.
    degrade_from: load from which the level is one lower; half way from there to 1 it is two lower. 0: never.
    degrade_by: "detail": the level is lowered. Otherwise a method of reduction: the level stays, and images
        keep SHARES_UNDER_LOAD of their usual tokens; with the method relevance they keep as many as the
        question needs, and at most so many. An image whose request names a method or a number keeps
        what the request names.
    usual_share: share of the tokens that images keep without load.
    """

    policy: DetailPolicy
    degrade_from: float = 0.0
    degrade_by: str = "detail"
    usual_share: float = 1.0

    @property
    def lossless(self) -> bool:
        """Whether `auto` is always the model's own resolution."""
        return isinstance(self.policy, FullDetail) and not self.degrade_from

    @classmethod
    def of(cls, settings: VisualSettings) -> DetailRule:
        """The rule for these settings."""
        wish = parse_visual_tokens(settings.visual_tokens)
        visual = None if wish is None else resolve_preset(wish)
        return cls(
            DETAIL_POLICIES[settings.detail_policy](),
            settings.degrade_from,
            settings.degrade_by,
            1.0 if visual is None else visual.share or 1.0,
        )

    def settle(
        self, budget: PixelBudget, question: str, load: float, steps_down: int = 0
    ) -> tuple[PixelBudget, str]:
        """Return the budget with a level in place of `auto`, and the reason for that level.

        question: the user's text of all turns.
        load: the engine's load, 0 or more.
        steps_down: fewest steps down, 0 to 2, because the first token would be late otherwise.
        """
        if budget.explicit:
            return budget, "the request sets pixels"
        if budget.detail != "auto":
            return budget, "the request sets the detail level"
        choice = self.policy.choose(question)
        by_load = self._steps_down(load)
        down = max(by_load, steps_down)
        cause = f"at a load of {load:.2f}" if by_load >= down else "so that the first token is in time"
        if self.degrade_by != "detail":
            if not down or budget.visual is not None:
                return replace(budget, detail=choice.level), choice.reason
            share = self.usual_share * SHARES_UNDER_LOAD[down - 1]
            if METHODS[self.degrade_by].by_region:
                wish = VisualTokens(self.degrade_by, AUTO, from_operator=True, at_most=share)
                kept = f"as many tokens as the question needs and at most {share:g} of them"
            else:
                wish = VisualTokens(self.degrade_by, share, from_operator=True)
                kept = f"{share:g} of its tokens"
            reason = f"{choice.reason}; the image keeps {kept} {cause}"
            return replace(budget, detail=choice.level, visual=wish), reason
        rank = max(0, LEVELS.index(choice.level) - down)
        reason = choice.reason
        if LEVELS[rank] != choice.level:
            reason = f"{choice.level} ({reason}), lowered {cause}"
        return replace(budget, detail=LEVELS[rank]), reason

    def _steps_down(self, load: float) -> int:
        if not self.degrade_from or load < self.degrade_from:
            return 0
        return 2 if load >= (1 + self.degrade_from) / 2 else 1
