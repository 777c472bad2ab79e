"""Decides which of a request's images are encoded closely, and which as a glance, on one budget of tokens.

The idea is that of LiteVLM (arXiv 2506.07416), which picks camera views before the encoder, with a small
model that reads the question. Here the choice must be known before the prompt is laid out, so there is no
model. It depends on the words that name images, and then on the content of the images.

A *glance* is a view of an image with very few tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fovea.relevance.pipeline import Survey
from fovea.relevance.policy import score
from fovea.relevance.texture import Map

GLANCES = 16, 4, 1
"""Sizes of a glance, in tokens at most. The largest is taken that leaves room for the images to encode
closely."""
GLANCE_SHARE = 0.25
"""Largest share of the budget for glances, if not even the best view fits beside glances of one token."""


@dataclass(frozen=True, slots=True)
class ViewScore:
    """How well an image fits the question.

    keywords: for each thing that the question's key words name, its amount in the image, divided by
        the amount that noise alone can give.
    content: how much the image contains at all, in [0, 1].
    """

    keywords: tuple[float, ...]
    content: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of tokens that an image can have.

    full: all of its tokens.
    glances: its tokens as a glance of each size in `GLANCES`: not more than that size. The last is
        always 1.
    """

    full: int
    glances: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ViewBudgets:
    """How a budget is divided among images.

    glance: index into `GLANCES` for all images that are not in `close`.
    close: the images to encode closely, by number, and the most tokens each may have.
    """

    glance: int
    close: Mapping[int, int]


def score_view(survey: Survey, question: str) -> ViewScore:
    """How well an image fits a question. A small thing in an empty image counts as much as a large one.

    It does not use `Survey.keyword_map`, which is scaled within one image: there, the most text-like part of
    an image without text would count as text.
    """
    keywords = tuple(_peak(values) / least for values, least in survey.keyword_amounts(question))
    return ViewScore(keywords, score(np.maximum(survey.propositional, survey.perspectival)))


def rank(mentions: Sequence[int], scores: Sequence[ViewScore], identities: Sequence[str]) -> list[int]:
    """Numbers of the images, best first.

    Images that a later turn names come first. Among those that the same turn names, or no turn, the order is:
    more of the things that the key words name, then more content, then the earlier image. Among images of the
    same turn, the second of two identical images comes after all different ones.

    mentions: the last turn that names each image; -1: none does. See `naming.last_mentions`.
    scores: `score_view` of each image.
    identities: of each image; equal for identical images.
    """
    shares = _keyword_shares(scores)
    by_score = sorted(
        range(len(scores)), key=lambda view: (-mentions[view], -shares[view], -scores[view].content, view)
    )
    known: set[str] = set()
    duplicates = set()
    for view in by_score:
        if identities[view] in known:
            duplicates.add(view)
        known.add(identities[view])
    return sorted(by_score, key=lambda view: (-mentions[view], view in duplicates))


def _keyword_shares(scores: Sequence[ViewScore]) -> list[float]:
    """For each image, how much it contains of the things that the key words name, rounded to tenths.

    For each thing, the image's amount is divided by the highest amount in any image, so the image with the
    most of it gets 1. The results are added up. If noise alone could give the highest amount, the divisor is
    the amount of noise, so no image gets 1.
    """
    most = [max(1.0, *things) for things in zip(*(one.keywords for one in scores), strict=True)]
    return [
        round(sum(value / full for value, full in zip(one.keywords, most, strict=True)), 1) for one in scores
    ]


def _peak(values: Map) -> float:
    """Mean of the highest hundredth."""
    cells = np.sort(values.ravel())[::-1]
    return float(cells[: max(1, len(cells) // 100)].mean())


def allot(sizes: Sequence[Sizes], order: Sequence[int], close_count: int, total: int) -> ViewBudgets:
    """Divide `total` tokens among images.

    In their order, images get all of their tokens as long as the rest can still have glances. The first that
    does not fit gets the remainder.

    sizes: of each image.
    order: numbers of the images, best first.
    close_count: how many of the first images should fit, with smaller glances for the others if necessary. If
        they do not fit, the best image should.
    total: not more than all images have, and at least one for each.
    """
    glance = _glance(sizes, order, close_count, total)
    left = total - sum(size.glances[glance] for size in sizes)
    close = {}
    for view in order:
        least = sizes[view].glances[glance]
        close[view] = min(sizes[view].full, least + left)
        left -= sizes[view].full - least
        if left <= 0:
            break
    return ViewBudgets(glance, close)


def _glance(sizes: Sequence[Sizes], order: Sequence[int], close_count: int, total: int) -> int:
    """Index into `GLANCES` of the largest glance that leaves enough room."""
    choices = range(len(GLANCES))
    for count in (close_count, 1):
        close, others = order[:count], order[count:]
        full = sum(sizes[view].full for view in close)
        for glance in choices:
            if full + sum(sizes[view].glances[glance] for view in others) <= total:
                return glance
    for glance in choices:
        best, *rest = (sizes[view].glances[glance] for view in order)
        if sum(rest) <= GLANCE_SHARE * total and best + sum(rest) <= total:
            return glance
    return choices[-1]
