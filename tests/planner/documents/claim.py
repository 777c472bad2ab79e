"""One figure of a document, and the judgement about it."""

from __future__ import annotations

from dataclasses import dataclass

VERDICTS = ("right", "rounded", "wrong")
"""Judgements.

right: the arithmetic gives the printed digits, or keeps the printed bound. rounded: it is off by less than
one in the last printed digit and by less than a tenth, or by at most APPROXIMATE where the document says
"about". wrong: anything else.
"""
RELATIONS = ("equals", "about", "at least", "at most", "between")
"""How the printed figure stands to the result.

equals: they are equal to the printed digits. about: the document says that it is approximate. at least:
the printed figure cannot be below the result. at most: it cannot be above it. between: the result lies from
`printed` to `high`.
"""
APPROXIMATE = 0.05
"""Share by which a figure that is called approximate may be off."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure of a document.

    section: heading under which it stands.
    says: the figure as it is printed, with its meaning.
    formula: our arithmetic, in words or signs.
    result: what it gives, in `unit`.
    printed: the figure of the document, in `unit`.
    digits: printed decimals.
    unit: unit of both; empty for counts and ratios.
    verdict: what we say about it (VERDICTS); `judge` must agree.
    why: what is wrong, or what a reader has to know; may be empty for right figures.
    relation: how the two are compared (RELATIONS).
    high: upper end, for "between".
    """

    section: str
    says: str
    formula: str
    result: float
    printed: float
    digits: int = 0
    unit: str = ""
    verdict: str = "right"
    why: str = ""
    relation: str = "equals"
    high: float = 0.0

    def judge(self) -> str:
        """Return the verdict that follows from result and printed figure."""
        if self.relation == "between":
            return "right" if self.printed <= self.result <= self.high else "wrong"
        if self.relation == "at least":
            return "right" if self.printed >= self.result else "wrong"
        if self.relation == "at most":
            return "right" if self.printed <= self.result else "wrong"
        if round(self.result, self.digits) == round(self.printed, self.digits):
            return "right"
        off = abs(self.result - self.printed)
        near = off < 10.0**-self.digits and off < abs(self.result) / 10
        if self.relation == "about":
            near = near or off <= APPROXIMATE * abs(self.result)
        return "rounded" if near else "wrong"


@dataclass(frozen=True, slots=True)
class Document:
    """A document with its claims, in its order. title: its own title."""

    title: str
    claims: tuple[Claim, ...]
