"""Runs the steps from pixels and a question to a layout: texture, knowing, balancing, attending.

There are two functions, because the model works between them. `survey` reads the image alone: it needs no
question, and may run in any thread. `realize` takes the model's coupling of question and image, and decides
which views are encoded. The decision and its reasons are in the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fovea.relevance.balancing import Tensions, Ways, balance, tensions_for
from fovea.relevance.knowing import keyword_amounts, perspectival, propositional
from fovea.relevance.policy import Allocation, content_mask
from fovea.relevance.realizing import Shape
from fovea.relevance.texture import Bytes, Map, Mask, Texture, texture

Chooser = Callable[[Map, Mask, int], Allocation]
"""Maps relevance and content of every cell, both (rows, columns), and a total of tokens to an allocation."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The part of relevance that needs no question: an image's texture and its first two maps.

    texture: channels of the image, cell by cell.
    propositional, perspectival: maps of knowing.py, (rows, columns) in [0, 1].
    """

    texture: Texture = field(repr=False)
    propositional: Map = field(repr=False)
    perspectival: Map = field(repr=False)

    @property
    def grid(self) -> Shape:
        """Rows and columns of cells."""
        return self.texture.grid

    def keyword_amounts(self, question: str) -> list[tuple[Map, float]]:
        """`knowing.keyword_amounts` of this image, on a scale that allows to compare images."""
        return keyword_amounts(self.texture, question)


@dataclass(frozen=True, slots=True)
class Realization:
    """The decision about one image and question, and its reasons.

    allocation: layout and regions.
    ways: the three maps.
    tensions: the tensions under which the maps were combined.
    relevance: of every cell, (rows, columns) in [0, 1].
    seconds: time that balancing and attending took.
    """

    allocation: Allocation
    ways: Ways = field(repr=False)
    tensions: Tensions
    relevance: Map = field(repr=False)
    seconds: float

    def explanation(self) -> dict[str, Any]:
        """The decision as JSON values, for an answer to a request with `explain`.

        tokens, of: number of visual tokens of the image, and the number without reduction.
        grid: rows and columns of cells.
        map: relevance of every cell, row by row.
        regions: for each region its `box` (left, top, right, bottom as shares of the image's sides), the
            means of the three maps, its relevance, its `tokens`, `of`, the number at native resolution, and
            `lod` (level of detail), the resolution per side as a share of the native one; 0: not encoded.

        A tile's newlines lie beyond the right border of the image: they count among the region's tokens, but
        are not in its box.
        """
        rows, columns = self.relevance.shape
        views = {view.region: view for view in self.allocation.layout.views[-len(self.allocation.regions) :]}
        regions = []
        for region, score, budget in zip(
            self.allocation.regions, self.allocation.scores, self.allocation.budgets, strict=True
        ):
            view = views.get(region)
            area = 0 if view is None or not budget else view.shape[0] * view.shape[1]
            regions.append(
                {
                    "box": [
                        round(region.column / columns, 4),
                        round(region.row / rows, 4),
                        round(min(region.column + region.columns, columns) / columns, 4),
                        round((region.row + region.rows) / rows, 4),
                    ],
                    **{
                        name: _rounded(getattr(self.ways, name)[region.cells].mean())
                        for name in ("propositional", "perspectival", "participatory")
                    },
                    "relevance": _rounded(score),
                    "tokens": budget,
                    "of": region.tokens,
                    "lod": _rounded((area / region.tokens) ** 0.5),
                }
            )
        return {
            "tensions": {
                "compress_particularize": _rounded(self.tensions.compress),
                "exploit_explore": _rounded(self.tensions.exploit),
                "focus_diversify": _rounded(self.tensions.focus),
            },
            "thumbnail_tokens": self.allocation.layout.tokens - sum(self.allocation.budgets),
            "tokens": self.allocation.layout.tokens,
            "of": self.allocation.full,
            "allocation_ms": round(self.seconds * 1000, 2),
            "grid": [rows, columns],
            "map": [[_rounded(value, 2) for value in line] for line in self.relevance],
            "regions": regions,
        }


def survey(pixels: Bytes, cell: int) -> Survey:
    """Read an image without a question. CPU-bound; thread-safe.

    pixels: (height, width, 3) bytes of RGB; height and width are multiples of `cell`, or ValueError is
        raised.
    cell: side in pixels of the square that becomes one visual token.
    """
    channels = texture(pixels, cell)
    return Survey(channels, propositional(channels), perspectival(channels))


def tensions(question: str, survey: Survey) -> Tensions:
    """The tensions of a question about a surveyed image."""
    return tensions_for(
        question, float(survey.propositional.mean()), float(np.quantile(survey.texture["sobel"], 0.99))
    )


def realize(
    survey: Survey, asked: Map | None, total: int, *, tensions: Tensions, choose: Chooser
) -> Realization:
    """Decide which views of an image are encoded.

    asked: the participatory map, (rows, columns) in [0, 1]; None: there is no question.
    total: tokens to be chosen.
    choose: the function that lays out the image by relevance, content and `total`.
    """
    started = time.perf_counter()
    participatory = np.zeros(survey.grid, np.float32) if asked is None else asked
    ways = Ways(survey.propositional, survey.perspectival, participatory)
    relevance = balance(ways, tensions)
    allocation = choose(relevance, content_mask(ways.propositional, ways.perspectival), total)
    return Realization(allocation, ways, tensions, relevance, time.perf_counter() - started)


def _rounded(value: float, digits: int = 4) -> float:
    return round(float(value), digits)
