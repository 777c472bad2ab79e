"""Which of a request's images are looked at closely, and which are glanced at, where all of them share one budget of tokens.

After LiteVLM (arXiv 2506.07416), which picks camera views before the encoder by a small model that reads the question. Here the
choice has to be known before a prompt is laid out, so there is no model: it goes by the words that name images, and then
by what the pictures hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fovea.relevance.pipeline import Survey
from fovea.relevance.policy import score
from fovea.relevance.texture import Map

GLANCES = 16, 4, 1
"""Tokens at most of an image that is glanced at: the first of them that leaves room to look at what is to be seen closely."""
GLANCED = 0.25
"""Share of the budget that glances may take where not even the best view fits beside glances of one token."""


@dataclass(frozen=True, slots=True)
class Worth:
    """asked: of each thing that the words ask for how much there is, in units of what is noise. content: how much there is at
    all, in [0, 1]."""

    asked: tuple[float, ...]
    content: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of an image: all of them, and at each of `GLANCES`: no more than that, and one at the last."""

    full: int
    glances: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Allotted:
    """level: of `GLANCES`, for all views that are not in `closely`. closely: views and their tokens at most."""

    level: int
    closely: Mapping[int, int]


def worth(seen: Survey, question: str) -> Worth:
    """What a picture holds of what the words ask for: a small thing in an empty picture counts as much as a large one.

    Not by `Survey.asked`, whose maps are of one image each: what stands out most in a picture without text would be text.
    """
    asked = tuple(_peak(values) / least for values, least in seen.wanted(question))
    return Worth(asked, score(np.maximum(seen.propositional, seen.perspectival)))


def ranked(named: Sequence[int], worths: Sequence[Worth], identities: Sequence[str]) -> list[int]:
    """Numbers of the views, best first. named: by which turn, the last one most of all; see `naming.latest`.

    Of views that the same turn names, or none, the one with more of what is asked for comes first, then the one that holds
    more at all, then the earlier; the second of two identical ones comes after all that differ.
    """
    asked = _asked(worths)
    by_worth = sorted(
        range(len(worths)), key=lambda view: (-named[view], -asked[view], -worths[view].content, view)
    )
    known: set[str] = set()
    again = set()
    for view in by_worth:
        if identities[view] in known:
            again.add(view)
        known.add(identities[view])
    return sorted(by_worth, key=lambda view: (-named[view], view in again))


def _asked(worths: Sequence[Worth]) -> list[float]:
    """Of each view, in tenths: shares of what the view with the most has, summed over the things that are asked for."""
    most = [max(1.0, *things) for things in zip(*(one.asked for one in worths), strict=True)]
    return [
        round(sum(value / full for value, full in zip(one.asked, most, strict=True)), 1) for one in worths
    ]


def _peak(values: Map) -> float:
    """Mean of the highest hundredth."""
    cells = np.sort(values.ravel())[::-1]
    return float(cells[: max(1, len(cells) // 100)].mean())


def allot(sizes: Sequence[Sizes], order: Sequence[int], wanted: int, total: int) -> Allotted:
    """order: best first. total: no more than all have, and at least one for each.

    In their order views get all of their tokens while the others can still be glanced at; the first that does not fit gets
    what is left. wanted: how many of the first should fit, if glances have to be smaller for it; at least the best should.
    """
    level = _level(sizes, order, wanted, total)
    left = total - sum(size.glances[level] for size in sizes)
    closely = {}
    for view in order:
        glance = sizes[view].glances[level]
        closely[view] = min(sizes[view].full, glance + left)
        left -= sizes[view].full - glance
        if left <= 0:
            break
    return Allotted(level, closely)


def _level(sizes: Sequence[Sizes], order: Sequence[int], wanted: int, total: int) -> int:
    """Which of `GLANCES`."""
    levels = range(len(GLANCES))
    for closely in (wanted, 1):
        close, others = order[:closely], order[closely:]
        full = sum(sizes[view].full for view in close)
        for level in levels:
            if full + sum(sizes[view].glances[level] for view in others) <= total:
                return level
    for level in levels:
        best, *others = (sizes[view].glances[level] for view in order)
        if sum(others) <= GLANCED * total and best + sum(others) <= total:
            return level
    return levels[-1]
