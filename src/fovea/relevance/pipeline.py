"""Runs the steps from pixels and a question to a layout: texture, knowing, balancing, attending.

There are two functions, because the model works between them. `survey` reads the image alone: it needs no
question, and may run in any thread. `realize` takes the model's look at the image with a question, and
decides which views are encoded. The decision and its reasons are in the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fovea.relevance.balancing import Tensions, Ways, balance, spread_of, tensions_for
from fovea.relevance.knowing import keyword_amounts, participatory, perspectival, propositional, readable_at
from fovea.relevance.policy import ASKED, Allocation, Cells, content_mask, score
from fovea.relevance.realizing import Region, Shape
from fovea.relevance.texture import Bytes, Map, Texture, texture

Chooser = Callable[[Cells, int], Allocation]
"""Maps an image's cells and a total of tokens to an allocation."""


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
    looks: how often the model looked at a view with the question; 0: there was no question.
    """

    allocation: Allocation
    ways: Ways = field(repr=False)
    tensions: Tensions
    relevance: Map = field(repr=False)
    seconds: float
    looks: int = 0

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
        for region, worth, budget in zip(
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
                    "relevance": _rounded(worth),
                    "why": self._why(region) if budget else "",
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
            "looks": self.looks,
            "allocation_ms": round(self.seconds * 1000, 2),
            "grid": [rows, columns],
            "map": [[_rounded(value, 2) for value in line] for line in self.relevance],
            "regions": regions,
        }

    def _why(self, region: Region) -> str:
        """The main reason for a region's tokens, in words."""
        if self.ways.participatory[region.cells].max() >= ASKED:
            return "asked about"
        stands_out, content = (
            score(values[region.cells]) for values in (self.ways.perspectival, self.ways.propositional)
        )
        return "stands out" if stands_out > content else "much content"


def survey(pixels: Bytes, cell: int) -> Survey:
    """Read an image without a question. CPU-bound; thread-safe.

    pixels: (height, width, 3) bytes of RGB; height and width are multiples of `cell`, or ValueError is
        raised.
    cell: side in pixels of the square that becomes one visual token.
    """
    channels = texture(pixels, cell)
    return Survey(channels, propositional(channels), perspectival(channels))


def tensions(question: str, survey: Survey, asked: Map | None) -> Tensions:
    """The tensions of a question about a surveyed image.

    asked: attention to each token of a view of the whole, any shape; None: there is no question.
    """
    spread = None if asked is None else spread_of(asked)
    return tensions_for(question, float(survey.propositional.mean()), spread)


def realize(
    survey: Survey, asked: Map | None, total: int, *, tensions: Tensions, choose: Chooser
) -> Realization:
    """Decide which views of an image are encoded.

    asked: attention to each token of a view of the whole, (rows, columns) of it; None: there is no question.
    total: tokens to be chosen.
    choose: lays out the image.
    """
    started = time.perf_counter()
    known = np.zeros(survey.grid, np.float32) if asked is None else participatory(asked, survey.texture)
    ways = Ways(survey.propositional, survey.perspectival, known)
    relevance = balance(ways, tensions)
    content = content_mask(ways.propositional, ways.perspectival)
    allocation = choose(Cells(relevance, content, known, readable_at(survey.texture)), total)
    seconds = time.perf_counter() - started
    return Realization(allocation, ways, tensions, relevance, seconds, int(asked is not None))


def _rounded(value: float, digits: int = 4) -> float:
    return round(float(value), digits)
