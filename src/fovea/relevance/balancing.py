"""Opponent processing: combines the three ways of knowing into one map of relevance, under three tensions.

After the ARR-COC design (its "Part 29", with the contextual weights of its "Part 37"):
    compress <-> particularize: content in general, or the cells that the question is coupled to
    exploit <-> explore: the cells that stand out, or those that do not
    focus <-> diversify: the most relevant cells alone, or also cells far from them

A tension is a number in [0, 1]; 1 is the first of the pair. Tensions depend on the question, the image and
the load. An answer can report them (`explain`). A model whose training included them has learned tensions;
others have the priors below.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fovea.relevance.texture import Map

WEIGHTS = 0.4, 0.3, 0.3
"""Weights of the results of the three tensions, in the order above."""
SMOOTH = 0.05
"""An image whose sharpness is lower has no fine detail."""
SPREAD = 0.3
"""Weight of the distance from the most relevant cells, at full diversity."""
PEAKS = 50
"""Most cells that count as the most relevant ones."""
_FINE = re.compile(
    r"\b(?:(?:text|word|letter|character|digit|number|code|label|name|date|price|detail)s?|read\w*|writ\w*|say|small|tiny)\b",
    re.IGNORECASE,
)
_GLOBAL = re.compile(
    r"\b(?:how many|count\w*|list|describe|everything|all|every|compare|scene|overall)\b", re.IGNORECASE
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

    def stack(self) -> Map:
        """The three maps in one array, (rows, columns, 3)."""
        return np.stack((self.propositional, self.perspectival, self.participatory), axis=-1)


def balance(ways: Ways, tensions: Tensions) -> Map:
    """Relevance of every cell, (rows, columns), scaled to [0, 1] within the image."""
    raw = (ways.propositional + ways.perspectival + 2 * ways.participatory) / 4
    first = tensions.compress * ways.propositional + (1 - tensions.compress) * ways.participatory
    second = tensions.exploit * ways.perspectival + (1 - tensions.exploit) * (1 - ways.perspectival)
    third = raw + (1 - tensions.focus) * SPREAD * remoteness(raw)
    return _to_unit(WEIGHTS[0] * first + WEIGHTS[1] * second + WEIGHTS[2] * third)


def tensions_for(question: str, busyness: float, sharpness: float) -> Tensions:
    """The tensions of a question about an image.

    busyness: mean of the propositional map. sharpness: quantile 0.99 of the density of edges.

    compress: low for questions about text and small things, which need detail; high for questions about all
        of the image (counting, describing); slightly raised for an image without fine detail, which loses
        nothing at a lower resolution.
    focus: lower for a busy image, so that more of it is covered than of a simple one.
    """
    compress = 0.5
    if _FINE.search(question):
        compress = 0.15
    elif _GLOBAL.search(question):
        compress = 0.85
    elif sharpness < SMOOTH:
        compress = 0.6
    return Tensions(compress, exploit=0.8, focus=float(np.clip(0.9 - 0.8 * busyness, 0.4, 0.9)))


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
