"""Opponent processing: combines the three ways of knowing into one map of relevance, under three tensions.

After the ARR-COC design (its "Part 29", with the contextual weights of its "Part 37"):
    compress <-> particularize: content in general, or the cells that the question is about
    exploit <-> explore: the cells that stand out, or those that do not
    focus <-> diversify: the most relevant cells alone, or also cells far from them

A tension is a number in [0, 1]; 1 is the first of the pair. Tensions depend on the question, the image and
the load. An answer can report them (`explain`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fovea.relevance.texture import Map

WEIGHTS = 0.4, 0.3, 0.3
"""Weights of the results of the three tensions, in the order above."""
LEAST_COMPRESS = 0.1
"""The tension between compress and particularize for a question about a part."""
PART_AND_WHOLE = 0.1, 0.4
"""A question about a part is spread over no more than the first share of an image, one about the whole over
the second or more."""
SPREAD = 0.3
"""Weight of the distance from the most relevant cells, at full diversity."""
PEAKS = 50
"""Most cells that count as the most relevant ones."""
_GLOBAL = re.compile(
    r"\b(?:how many|number of|count\w*|list\w*|describ\w*|description|summar\w+|transcri\w+|explain\w*|"
    r"everything|all|every|each|whole|entire|both|compar\w*|differen\w+|changed|scene|overall|"
    r"(?:document|page|picture|photo|image|screenshot)s? (?:says?|contains?|shows?|is about))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Tensions:
    """The three tensions, each in [0, 1]; 1 is the side that gives the field its name.

    compress: against particularize.
    exploit: against explore.
    focus: against diversify.
    """

    compress: float
    exploit: float
    focus: float

    def under(self, load: float) -> Tensions:
        """The tensions under that load: exploration and diversity fall to 0 at a load of 1.

        load: clipped to [0, 1].
        """
        ease = min(1.0, max(0.0, load))
        return Tensions(
            self.compress, self.exploit + (1 - self.exploit) * ease, self.focus + (1 - self.focus) * ease
        )


@dataclass(frozen=True, slots=True)
class Ways:
    """The maps of the three ways of knowing, each (rows, columns) in [0, 1]; see knowing.py."""

    propositional: Map
    perspectival: Map
    participatory: Map


def balance(ways: Ways, tensions: Tensions) -> Map:
    """Relevance of every cell, (rows, columns), scaled to [0, 1] within the image."""
    raw = (ways.propositional + ways.perspectival + 2 * ways.participatory) / 4
    first = tensions.compress * ways.propositional + (1 - tensions.compress) * ways.participatory
    second = tensions.exploit * ways.perspectival + (1 - tensions.exploit) * (1 - ways.perspectival)
    third = raw + (1 - tensions.focus) * SPREAD * remoteness(raw)
    return _to_unit(WEIGHTS[0] * first + WEIGHTS[1] * second + WEIGHTS[2] * third)


def tensions_for(question: str, busyness: float, spread: float | None) -> Tensions:
    """The tensions of a question about an image.

    busyness: mean of the propositional map.
    spread: share of the image that the question is about, from `spread_of`; None: there is no question.

    compress: low for a question about one part, which needs detail; higher if the model looks everywhere, and
        highest for a question whose words are about all of the image.
    focus: lower for a busy image, so that more of it is covered than of a simple one.
    """
    compress = 0.5
    if spread is not None:
        low, high = PART_AND_WHOLE
        compress = LEAST_COMPRESS + 0.55 * float(np.clip((spread - low) / (high - low), 0, 1))
    if asks_for_all(question):
        compress = max(compress, 0.85)
    return Tensions(compress, exploit=0.8, focus=float(np.clip(0.9 - 0.8 * busyness, 0.4, 0.9)))


def asks_for_all(question: str) -> bool:
    """Whether a question's words, in English, are about all of an image, such as counting or describing."""
    return _GLOBAL.search(question) is not None


def spread_of(values: Map) -> float:
    """The share of cells among which values are spread: 1 if they are even, 1 / cells if one has all.

    It is the exponential of their entropy, divided by the number of cells.
    """
    share = values[(values > 0) & np.isfinite(values)].astype(np.float64)
    if not len(share):
        return 1.0
    share /= share.sum()
    return float(np.exp(-(share * np.log(share)).sum())) / values.size


def remoteness(raw: Map) -> Map:
    """Distance of each cell to the nearest of the most relevant cells, as a share of the largest distance.

    raw: relevance before the tensions, (rows, columns); the result has its shape.
    """
    rows, columns = raw.shape
    count = max(1, min(PEAKS, raw.size // 5))
    peaks = np.argsort(-raw.ravel(), kind="stable")[:count]
    y, x = np.divmod(np.arange(raw.size), columns)
    places = np.stack((y / rows, x / columns), axis=1).astype(np.float32)
    apart = np.square(places[:, None] - places[peaks][None]).sum(2).min(1)
    distance = np.sqrt(apart).reshape(raw.shape)
    share: Map = distance / max(float(distance.max()), 1e-6)
    return share


def _to_unit(values: Map) -> Map:
    low, high = float(values.min()), float(values.max())
    return ((values - low) / max(high - low, 1e-6)).astype(np.float32)
