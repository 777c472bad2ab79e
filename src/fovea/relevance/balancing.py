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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.relevance.texture import Map

WEIGHTS = 0.4, 0.3, 0.3
"""Weights of the results of the three tensions, in the order above."""
BUSYNESS, SHARPNESS = 0, 6
"""Indices into `Survey.statistics`: mean of the propositional map, quantile 0.99 of the density of edges."""
SMOOTH = 0.05
"""An image whose sharpness is lower has no fine detail."""
SPREAD = 0.3
"""Weight of the distance from the most relevant cells, at full diversity."""
PEAKS = 50
"""Most cells that count as the most relevant ones."""
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


class Balancer:
    """Derives tensions and relevance, by learned networks where there are any, else by the design's priors.

    There are two networks, and either may be missing: `raw` maps the three values of a cell to its relevance,
    `context` maps the question and the image's statistics to the tensions. Training keeps a network only if
    it is better than the prior.
    """

    def __init__(self, weights: Mapping[str, Array] | None = None) -> None:
        """weights: parameters of the networks, arrays by name; None: no network was trained."""
        self._weights = weights or {}

    @property
    def learns_tensions(self) -> bool:
        """Whether there is a network for the tensions."""
        return "context.0.weight" in self._weights

    def tensions(self, question: str, words: Array | None, image: Array) -> Tensions:
        """The tensions of a question about an image, before the load is considered.

        question: the question's text, for the prior.
        words: the question's pooled embedding, (D,), for the network; None: use the prior.
        image: `Survey.statistics`, (10,).
        """
        if not self.learns_tensions or words is None:
            return prior(question, image)
        raw = _mlp(self._weights, "context", np.concatenate((words, image)))
        return Tensions(*(float(value) for value in sigmoid(raw)))

    def balance(self, ways: Ways, tensions: Tensions) -> Map:
        """Relevance of every cell, (rows, columns), scaled to [0, 1] within the image."""
        raw = self._raw(ways)
        first = tensions.compress * ways.propositional + (1 - tensions.compress) * ways.participatory
        second = tensions.exploit * ways.perspectival + (1 - tensions.exploit) * (1 - ways.perspectival)
        third = raw + (1 - tensions.focus) * SPREAD * remoteness(raw)
        total = WEIGHTS[0] * first + WEIGHTS[1] * second + WEIGHTS[2] * third
        return _to_unit(total)

    def _raw(self, ways: Ways) -> Map:
        if "raw.0.weight" not in self._weights:
            return ((ways.propositional + ways.perspectival + 2 * ways.participatory) / 4).astype(np.float32)
        return sigmoid(_mlp(self._weights, "raw", ways.stack())[..., 0])


def prior(question: str, image: Array) -> Tensions:
    """The tensions where none were learned.

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
    elif image[SHARPNESS] < SMOOTH:
        compress = 0.6
    return Tensions(compress, exploit=0.8, focus=float(np.clip(0.9 - 0.8 * image[BUSYNESS], 0.4, 0.9)))


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
    share: Array = distance / max(float(distance.max()), 1e-6)
    return share


def _to_unit(values: Map) -> Map:
    low, high = float(values.min()), float(values.max())
    return ((values - low) / max(high - low, 1e-6)).astype(np.float32)


def _mlp(weights: Mapping[str, Array], name: str, x: Array) -> Array:
    """Apply the linear layers `name`.0, `name`.1, ... with ReLU between them."""
    layer = 0
    while f"{name}.{layer}.weight" in weights:
        if layer:
            x = np.maximum(x, 0)
        x = x @ weights[f"{name}.{layer}.weight"].T + weights[f"{name}.{layer}.bias"]
        layer += 1
    return x


def sigmoid(x: Array) -> Array:
    """The logistic function, by tanh, which does not overflow for large values."""
    values: Array = (0.5 + 0.5 * np.tanh(0.5 * x)).astype(np.float32)
    return values
