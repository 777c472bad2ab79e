"""The way from pixels and a question to a layout, in the order of the verbs: texture, knowing, balancing, attending.

Two steps, because the middle one is the model's: `survey` reads the picture alone, in any thread and for every question;
`realize` takes what the model makes of question and image, and says what to encode. What it decided is in the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fovea.relevance.balancing import Balancer, Tensions, Ways
from fovea.relevance.knowing import keywords, perspectival, propositional, wanted
from fovea.relevance.policy import Attended, content
from fovea.relevance.realizing import Shape
from fovea.relevance.texture import Bytes, Map, Mask, Texture, texture

Chooser = Callable[[Map, Mask, int], Attended]
"""Relevance and content of every cell, (rows, columns), and a total of tokens, to what is shown."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What the picture says by itself: its texture, and the two ways of knowing that no question is needed for."""

    seen: Texture = field(repr=False)
    propositional: Map = field(repr=False)
    perspectival: Map = field(repr=False)

    @property
    def grid(self) -> Shape:
        return self.seen.grid

    def asked(self, question: str) -> Map:
        """What words alone ask for, of every cell."""
        return keywords(self.seen, question)

    def wanted(self, question: str) -> list[tuple[Map, float]]:
        """For each of these things how much there is in every cell, to compare images by, and what of it is noise."""
        return wanted(self.seen, question)

    def statistics(self, total: int) -> Map:
        """What the tensions go by, (10,): mean and deviation of either map, mean and upper quantiles of the density of edges,
        and the share of the tokens that there is to give away, on a scale of images."""
        edges = self.seen["sobel"]
        cells = edges.size
        values = (
            self.propositional.mean(), self.propositional.std(), self.perspectival.mean(), self.perspectival.std(),
            edges.mean(), np.quantile(edges, 0.9), np.quantile(edges, 0.99), np.log2(total) / 10,
        )  # fmt: skip
        found: Map = np.array((*values, total / cells, np.log2(cells) / 10), np.float32)
        return found


@dataclass(frozen=True, slots=True)
class Realized:
    """ways, tensions: of what `worth`, the relevance of every cell, was made. seconds: of balancing and attending."""

    attended: Attended
    ways: Ways = field(repr=False)
    tensions: Tensions
    worth: Map = field(repr=False)
    seconds: float

    def explanation(self) -> dict[str, Any]:
        """For whoever asks: numbers, and regions in shares of the image's sides (left, top, right, bottom).

        A tile's newlines lie beyond the image's right border: they count among its tokens, and not in its box.
        """
        rows, columns = self.worth.shape
        shown = {view.region: view for view in self.attended.layout.views[-len(self.attended.regions) :]}
        regions = []
        for region, score, budget in zip(
            self.attended.regions, self.attended.scores, self.attended.budgets, strict=True
        ):
            view = shown.get(region)
            regions.append(
                {
                    "box": [
                        round(region.column / columns, 4),
                        round(region.row / rows, 4),
                        round(min(region.column + region.columns, columns) / columns, 4),
                        round((region.row + region.rows) / rows, 4),
                    ],
                    "propositional": _rounded(self.ways.propositional[region.cells].mean()),
                    "perspectival": _rounded(self.ways.perspectival[region.cells].mean()),
                    "participatory": _rounded(self.ways.participatory[region.cells].mean()),
                    "relevance": _rounded(score),
                    "tokens": budget,
                    "of": region.tokens,
                    "lod": 0.0 if view is None or not budget else _rounded((view.shape[0] * view.shape[1] / region.tokens) ** 0.5),
                }
            )  # fmt: skip
        return {
            "tensions": {
                "compress_particularize": _rounded(self.tensions.compress),
                "exploit_explore": _rounded(self.tensions.exploit),
                "focus_diversify": _rounded(self.tensions.focus),
            },
            "thumbnail_tokens": self.attended.layout.tokens - sum(self.attended.budgets),
            "tokens": self.attended.layout.tokens,
            "of": self.attended.full,
            "allocation_ms": round(self.seconds * 1000, 2),
            "grid": [rows, columns],
            "map": [[_rounded(value, 2) for value in line] for line in self.worth],
            "regions": regions,
        }


def survey(pixels: Bytes, cell: int) -> Survey:
    """pixels (height, width, 3) bytes; cell: side in pixels of what becomes a token."""
    seen = texture(pixels, cell)
    return Survey(seen, propositional(seen), perspectival(seen))


def realize(
    surveyed: Survey,
    participatory: Map,
    total: int,
    *,
    tensions: Tensions,
    balancer: Balancer,
    choose: Chooser,
) -> Realized:
    """participatory: of every cell, (rows, columns) in [0, 1]. choose: what becomes of every cell's relevance, whether it has
    content, and `total`."""
    started = time.perf_counter()
    ways = Ways(surveyed.propositional, surveyed.perspectival, participatory)
    worth = balancer.balance(ways, tensions)
    attended = choose(worth, content(ways), total)
    return Realized(attended, ways, tensions, worth, time.perf_counter() - started)


def _rounded(value: float, digits: int = 4) -> float:
    return round(float(value), digits)
