"""At which level an image is looked at whose request says `detail: auto`: a policy reads the question, load may lower it.

A request that names a level or pixels gets what it names. Every choice carries its reason, which the answer discloses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from fovea.core.image import LEVELS, Level, PixelBudget, VisualTokens
from fovea.engine.visual_budget.methods import policy, settled

if TYPE_CHECKING:  # the settings check names of methods, so they import this package
    from fovea.engine.config import VisualSettings

KEPT_UNDER_LOAD = 0.5, 0.25


@dataclass(frozen=True, slots=True)
class Choice:
    level: Level
    reason: str


class DetailPolicy(Protocol):
    def choose(self, question: str) -> Choice:
        """question: all that the user said in the conversation; empty where an image is encoded ahead of any."""
        ...


class Full:
    """What the model was made for. Loses nothing, so it is the default."""

    def choose(self, question: str) -> Choice:
        return Choice("high", "auto is the model's own resolution here")


class Keywords:
    """Words of the question (English) tell how closely to look: high for text and small things, medium for counting and
    places, low for the rest. All turns count, so that the level of a conversation only rises, and its KV stays good.
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

    def choose(self, question: str) -> Choice:
        if not question.strip():
            return Choice("high", "nothing is asked yet")
        for level, words in self._patterns:
            found = words.search(question)
            if found:
                return Choice(level, f"the question says {found.group().lower()!r}")
        return Choice("low", "no word of the question asks for more")


def _any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    """Whole words with the usual endings: "reading" and "details", not "thread"."""
    return re.compile(rf"\b(?:{'|'.join(words)})(?:s|ed|er|est|ing)?\b", re.IGNORECASE)


DETAIL_POLICIES: dict[str, type[DetailPolicy]] = {"full": Full, "keywords": Keywords}


@dataclass(frozen=True, slots=True)
class DetailRule:
    """policy: for `auto`. degrade_from: the load from which `auto` loses a level, and half way from there to 1 another;
    0: never. Load is what requests in flight may come to take of the engine, see `engine.admission`.

    degrade_by: "detail", or the method by which images rather lose tokens: half of them, then three quarters, of those that
    the engine's policy leaves: `usual`, a share. A request that says how many it wants gets them, at the level of its `auto`.
    """

    policy: DetailPolicy
    degrade_from: float = 0.0
    degrade_by: str = "detail"
    usual: float = 1.0

    @property
    def lossless(self) -> bool:
        return isinstance(self.policy, Full) and not self.degrade_from

    @classmethod
    def of(cls, settings: VisualSettings) -> DetailRule:
        """The rule that the engine's settings describe."""
        wish = policy(settings.visual_tokens)
        visual = None if wish is None else settled(wish)
        return cls(
            DETAIL_POLICIES[settings.detail_policy](),
            settings.degrade_from,
            settings.degrade_by,
            1.0 if visual is None or visual.keep is None else visual.keep,
        )

    def settle(self, budget: PixelBudget, question: str, load: float) -> tuple[PixelBudget, str]:
        """The budget with a level in place of `auto`, and why it is that level."""
        if budget.explicit:
            return budget, "pixels were asked for"
        if budget.detail != "auto":
            return budget, "asked for"
        choice = self.policy.choose(question)
        down = self._steps_down(load)
        if self.degrade_by != "detail":
            if not down or budget.visual is not None:
                return replace(budget, detail=choice.level), choice.reason
            wish = VisualTokens(self.degrade_by, keep=self.usual * KEPT_UNDER_LOAD[down - 1])
            reason = f"{choice.reason}; {wish.keep:g} of its tokens at a load of {load:.2f}"
            return replace(budget, detail=choice.level, visual=wish), reason
        rank = max(0, LEVELS.index(choice.level) - down)
        reason = choice.reason
        if LEVELS[rank] != choice.level:
            reason = f"{choice.level} ({reason}), lowered at a load of {load:.2f}"
        return replace(budget, detail=LEVELS[rank]), reason

    def _steps_down(self, load: float) -> int:
        if not self.degrade_from or load < self.degrade_from:
            return 0
        return 2 if load >= (1 + self.degrade_from) / 2 else 1
