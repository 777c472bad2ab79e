"""Opponent processing: what the three ways of knowing make of a cell, under three tensions.

After the ARR-COC design (its "Part 29", with the contextual weights of its "Part 37"):
    compress <-> particularize: content in general, or what the question is coupled to
    exploit <-> explore: what stands out, or what does not
    focus <-> diversify: the relevant itself, or what lies far from the most relevant, too
A tension is a number in [0, 1], 1 being the first of the pair. They depend on the question, on the image and on the load,
are shown to whoever asks, and are learned where there is something to learn from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.relevance.texture import Map

WEIGHTS = 0.4, 0.3, 0.3
"""Of the tensions' results."""
BUSY, SHARPEST = 0, 6
"""Of `Survey.statistics`: the mean of the propositional map, and the highest density of edges."""
SMOOTH = 0.05
SPREAD = 0.3
"""How much distance from the most relevant counts."""
PEAKS = 50
Array = NDArray[np.floating[Any]]
_FINE = re.compile(
    r"\b(?:(?:text|word|letter|character|digit|number|code|label|name|date|price|detail)s?|read\w*|writ\w*|say|small|tiny)\b",
    re.IGNORECASE,
)
_GLOBAL = re.compile(
    r"\b(?:how many|count\w*|list|describe|everything|all|every|compare|scene|overall)\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Tensions:
    compress: float
    exploit: float
    focus: float

    def under(self, load: float) -> Tensions:
        """A busy engine looks less around: exploration and diversity give way, down to none at full load."""
        ease = min(1.0, max(0.0, load))
        return Tensions(
            self.compress, self.exploit + (1 - self.exploit) * ease, self.focus + (1 - self.focus) * ease
        )


@dataclass(frozen=True, slots=True)
class Ways:
    """The three maps, (rows, columns) in [0, 1]."""

    propositional: Map
    perspectival: Map
    participatory: Map

    def stacked(self) -> Map:
        return np.stack((self.propositional, self.perspectival, self.participatory), axis=-1)


class Balancer:
    """weights: what was learned, arrays by name; None, or without the networks below: the design's priors.

    Learned may be `raw`, a small network from the three maps of a cell to its relevance, and `context`, one from the question
    and the image's statistics to the tensions; training keeps them where they win over the priors.
    """

    def __init__(self, weights: Mapping[str, Array] | None = None) -> None:
        self._weights = weights or {}

    @property
    def learned(self) -> bool:
        return "context.0.weight" in self._weights

    def tensions(self, question: str, words: Array | None, image: Array) -> Tensions:
        """words: the question's pooled embedding, for the learned part; None: there is none. image: `Survey.statistics`."""
        if not self.learned or words is None:
            return prior(question, image)
        raw = _mlp(self._weights, "context", np.concatenate((words, image)))
        return Tensions(*(float(value) for value in sigmoid(raw)))

    def balance(self, ways: Ways, tensions: Tensions) -> Map:
        """Relevance of every cell, in [0, 1] within the image."""
        raw = self._raw(ways)
        first = tensions.compress * ways.propositional + (1 - tensions.compress) * ways.participatory
        second = tensions.exploit * ways.perspectival + (1 - tensions.exploit) * (1 - ways.perspectival)
        third = raw + (1 - tensions.focus) * SPREAD * remoteness(raw)
        total = WEIGHTS[0] * first + WEIGHTS[1] * second + WEIGHTS[2] * third
        return _to_unit(total)

    def _raw(self, ways: Ways) -> Map:
        if "raw.0.weight" not in self._weights:
            return ((ways.propositional + ways.perspectival + 2 * ways.participatory) / 4).astype(np.float32)
        return sigmoid(_mlp(self._weights, "raw", ways.stacked())[..., 0])


def prior(question: str, image: Array) -> Tensions:
    """Where nothing was learned: what has to be read wants detail, what has to be counted or described all of the image, and
    what has no fine detail loses nothing at a lower resolution. A busy image is looked at more widely than a simple one."""
    compress = 0.5
    if _FINE.search(question):
        compress = 0.15
    elif _GLOBAL.search(question):
        compress = 0.85
    elif image[SHARPEST] < SMOOTH:
        compress = 0.6
    return Tensions(compress, exploit=0.8, focus=float(np.clip(0.9 - 0.8 * image[BUSY], 0.4, 0.9)))


def remoteness(raw: Map) -> Map:
    """Distance of each cell to the nearest of the most relevant ones, of the largest such distance."""
    rows, columns = raw.shape
    count = max(1, min(PEAKS, raw.size // 5))
    peaks = np.argsort(-raw.ravel(), kind="stable")[:count]
    y, x = np.divmod(np.arange(raw.size), columns)
    places = np.stack((y / rows, x / columns), axis=1).astype(np.float32)
    apart = np.square(places[:, None] - places[peaks][None]).sum(2).min(1)
    distance = np.sqrt(apart).reshape(raw.shape)
    found: Array = distance / max(float(distance.max()), 1e-6)
    return found


def _to_unit(values: Map) -> Map:
    low, high = float(values.min()), float(values.max())
    return ((values - low) / max(high - low, 1e-6)).astype(np.float32)


def _mlp(weights: Mapping[str, Array], name: str, x: Array) -> Array:
    """Linear layers `name`.0, `name`.1, ... with ReLU between them."""
    layer = 0
    while f"{name}.{layer}.weight" in weights:
        if layer:
            x = np.maximum(x, 0)
        x = x @ weights[f"{name}.{layer}.weight"].T + weights[f"{name}.{layer}.bias"]
        layer += 1
    return x


def sigmoid(x: Array) -> Array:
    """By tanh, which does not overflow where the network is certain."""
    found: Array = (0.5 + 0.5 * np.tanh(0.5 * x)).astype(np.float32)
    return found
