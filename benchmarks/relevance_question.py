"""Measure whether `relevance` follows the question, on generated scenes with three things to ask about.

    python benchmarks/relevance_question.py [MODEL] [--scenes 120] [--keep 0.1,0.025]

Each large held-out scene has a code in small letters, one to three small items, and a large item. Each of the
three things has a question of its own. For every thing the decision for its own question is compared with the
decision for an unrelated question: the one about another thing of the same scene. Only the question differs,
so whatever differs between the two decisions follows from the question.

The asked cells are those that overlap the thing's box by at least half of the largest overlap of any cell.
A token lies in the box if the part of the image that it shows has an asked cell. The tokens of regions are
those of all views except the view of the whole; if an image is not divided, they are its tokens if these are
native, and there are none if they are not. The tokens are read from the decision itself, not from the
explanation, which does not have their places. There are three figures:

  percentile      of the best asked cell among all cells, in the participatory map and in the relevance map
  share           share of the tokens of regions that lie in the box
  without token   how many questions leave the thing without any token of a region

Means have a 95% interval of a bootstrap over scenes, counts have Wilson's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

sys.path.append(str(Path(__file__).parent))

from fovea.cli.sweep import aligned_markdown
from fovea.engine.config import EngineConfig
from fovea.engine.load import LoadedModel, load_model
from fovea.evaluation.scenes import HELD_OUT_SEED, Turn, questions
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.phrasing import boxes_around
from fovea.evaluation.scenes.scene import Box, Scene
from fovea.evaluation.scenes.small import SMALL_ITEM, compose_small
from fovea.evaluation.score import wilson
from fovea.kernels.choose import set_threads
from fovea.relevance.pipeline import Realization
from fovea.relevance.realizing import View
from relevance_encoder import RelevanceEncoder
from relevance_page import Verdict

SIZES = (1344, 896), (896, 1344), (1024, 1024)
KEEPS = (0.1, 0.025)
"""Shares of the tokens that are kept. At a tenth there is room for nearly all content of such a scene,
whatever is asked. At a fortieth there is not, so something has to be left out."""
TEXT, SMALL, LARGE = KINDS = "small text", "small object", "large object"
ALL = "all"
SCENES = 120
TIMES_AS_MUCH, MOST_WITHOUT = 2.0, 0.01
"""Targets: the share of the own question against that of the unrelated one, and the largest share of own
questions that leave the thing without a token."""
RESAMPLES = 2000
ATTEMPTS = 30
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Thing:
    """A thing of a scene, with a question about it.

    kind: one of KINDS.
    box: the thing's box as shares of the image's sides: left, top, right, bottom.
    """

    kind: str
    question: str
    box: Box


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of one decision about one thing.

    participatory, relevance: percentile of the best asked cell in each map, 0 to 100.
    tokens: tokens of regions. inside: those of them that lie in the box.
    """

    participatory: float
    relevance: float
    tokens: int
    inside: int

    @property
    def share(self) -> float:
        return self.inside / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """The decisions for the own and the unrelated question of a thing, read for this thing.

    scene: number of the scene.
    """

    scene: int
    kind: str
    own: Reading
    unrelated: Reading


READINGS: Mapping[str, Callable[[Pair], Reading]] = {
    "own": lambda pair: pair.own, "unrelated": lambda pair: pair.unrelated,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Result:
    """All pairs of a run.

    keep: the share of tokens that were kept.
    """

    keep: float
    pairs: tuple[Pair, ...]

    @property
    def scenes(self) -> int:
        return len({pair.scene for pair in self.pairs})

    def of(self, kind: str) -> list[Pair]:
        """The pairs of a kind, or of ALL."""
        return [pair for pair in self.pairs if kind in (pair.kind, ALL)]

    def mean(self, kind: str, figure: Callable[[Pair], float]) -> Estimate:
        """Mean of a figure, with a bootstrap over scenes."""
        sums = self._sums(kind, figure)
        return _estimate(sums[:, 0], sums[:, 1])

    def ratio(self, kind: str) -> Estimate:
        """Mean share of the own questions as a multiple of that of the unrelated ones."""
        own = self._sums(kind, lambda pair: pair.own.share)[:, 0]
        return _estimate(own, self._sums(kind, lambda pair: pair.unrelated.share)[:, 0])

    def without_token(self, kind: str, figure: Callable[[Pair], Reading]) -> tuple[int, int]:
        """How many questions leave the thing without a token of a region, and how many there are."""
        pairs = self.of(kind)
        return sum(not figure(pair).inside for pair in pairs), len(pairs)

    def _sums(self, kind: str, figure: Callable[[Pair], float]) -> NDArray[np.float64]:
        """Sum of a figure, and number of pairs, of each scene: (scenes, 2)."""
        sums: dict[int, list[float]] = {}
        for pair in self.of(kind):
            entry = sums.setdefault(pair.scene, [0.0, 0.0])
            entry[0] += figure(pair)
            entry[1] += 1
        return np.array(list(sums.values()))


def _estimate(above: NDArray[np.float64], below: NDArray[np.float64]) -> Estimate:
    """Quotient of two sums over scenes, with the interval of a bootstrap over scenes."""
    chosen = np.random.default_rng(0).integers(0, len(above), (RESAMPLES, len(above)))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.sort(above[chosen].sum(1) / below[chosen].sum(1))
        low, high = values[[RESAMPLES // 40, RESAMPLES - 1 - RESAMPLES // 40]]
        return Estimate(float(above.sum() / below.sum()), float(low), float(high))


def scenes(seed: int, count: int) -> Iterator[tuple[Image, tuple[Thing, ...]]]:
    """Scenes with three things each, one of each kind."""
    rng, done = Random(f"{seed}/question"), 0
    while done < count:
        scene = compose_small(rng, *rng.choice(SIZES), labels=1, small=rng.choice((1, 2, 3)), large=1)
        turns = [_about_text(rng, scene), *(_about_item(rng, scene, kind) for kind in (SMALL, LARGE))]
        things = [
            Thing(kind, turn.question, _as_shares(scene, turn.focus[0]))
            for kind, turn in zip(KINDS, turns, strict=True)
            if turn is not None
        ]
        if len(things) == len(KINDS):
            done += 1
            yield draw(scene), tuple(things)


def _about_text(rng: Random, scene: Scene) -> Turn | None:
    reading = questions.reading_of(rng, scene)
    return None if reading is None else reading[0]


def _about_item(rng: Random, scene: Scene, kind: str) -> Turn | None:
    """A question about the colour or shape of a small or large item; None: none was drawn."""
    boxes = {
        boxes_around(scene, item) for item in scene.items if (item.size <= SMALL_ITEM[1]) == (kind == SMALL)
    }
    for _ in range(ATTEMPTS):
        turn = rng.choice((questions.colour, questions.shape))(rng, scene)
        if turn is not None and turn.focus in boxes:
            return turn
    return None


def _as_shares(scene: Scene, box: Box) -> Box:
    left, top, right, bottom = box
    return left / scene.width, top / scene.height, right / scene.width, bottom / scene.height


def asked_cells(box: Box, grid: tuple[int, int]) -> Mask:
    """Whether each cell overlaps a box by at least half of the largest overlap, (rows, columns)."""
    down, across = _overlaps(grid[0], box[1], box[3]), _overlaps(grid[1], box[0], box[2])
    overlap = down[:, None] * across[None]
    cells: Mask = overlap >= overlap.max() / 2
    return cells


def _overlaps(count: int, start: float, end: float) -> NDArray[np.float64]:
    edges = np.arange(count + 1) / count
    overlaps: NDArray[np.float64] = np.minimum(edges[1:], end) - np.maximum(edges[:-1], start)
    return overlaps.clip(0.0)


def best_percentile(values: NDArray[Any], asked: Mask) -> float:
    """Percentile of the best asked cell among all other cells, 0 to 100; of equal cells, half are lower."""
    best = values[asked].max()
    lower, equal = int((values < best).sum()), int((values == best).sum()) - 1
    return 100 * (lower + equal / 2) / (values.size - 1)


def region_views(realization: Realization) -> tuple[View, ...]:
    """The views whose tokens are tokens of regions."""
    first, *rest = realization.allocation.layout.views
    return (first,) if not rest and first.native else tuple(rest)


def inside(view: View, asked: Mask) -> int:
    """How many kept tokens of a view show an asked cell."""
    down = _shown(view.region.row, view.region.rows, view.shape[0], asked.shape[0])
    across = _shown(view.region.column, view.region.columns, view.shape[1], asked.shape[1])
    shows = (down.astype(int) @ asked.astype(int) @ across.T.astype(int)) > 0
    return int(shows.ravel()[list(view.token_indices)].sum())


def _shown(start: int, length: int, count: int, cells: int) -> Mask:
    """Whether each of `count` lines of tokens shows each line of cells, (count, cells)."""
    at, line = np.arange(count)[:, None], np.arange(cells)[None]
    first, end = start + at * length // count, start + -(-(at + 1) * length // count)
    return (first <= line) & (line < end)


def read(realization: Realization, box: Box) -> Reading:
    asked = asked_cells(box, realization.allocation.layout.grid)
    views = region_views(realization)
    return Reading(
        best_percentile(realization.ways.participatory, asked),
        best_percentile(realization.relevance, asked),
        sum(view.tokens for view in views),
        sum(inside(view, asked) for view in views),
    )


def measure(
    loaded: LoadedModel, count: int, seed: int = HELD_OUT_SEED, keeps: Sequence[float] = KEEPS
) -> tuple[Result, ...]:
    """Decide about all questions of `count` scenes at each share of the tokens."""
    encoder = RelevanceEncoder(loaded, caches=True)
    pairs: dict[float, list[Pair]] = {keep: [] for keep in keeps}
    for number, (image, things) in enumerate(scenes(seed, count)):
        for keep in keeps:
            decisions = [encoder.realize(encoder.prepare(image, one.question, keep)) for one in things]
            for place, thing in enumerate(things):
                # Each of the other two things is the unrelated one in half of the scenes.
                other = (place + 1 + number % 2) % len(things)
                own, unrelated = (read(decisions[at], thing.box) for at in (place, other))
                pairs[keep].append(Pair(number, thing.kind, own, unrelated))
    return tuple(Result(keep, tuple(members)) for keep, members in pairs.items())


def verdicts(results: Sequence[Result]) -> list[Verdict]:
    return [verdict for result in results for verdict in _verdicts(result)]


def _verdicts(result: Result) -> list[Verdict]:
    ratio = result.ratio(ALL)
    failed, cases = result.without_token(ALL, lambda pair: pair.own)
    return [
        Verdict(
            f"relevance {result.keep:g} gives the asked thing at least {TIMES_AS_MUCH:g}x the share of the "
            "tokens of regions that an unrelated question gives it",
            f"{ratio.value:.1f}x ({ratio.low:.1f} to {ratio.high:.1f})",
            ratio.value >= TIMES_AS_MUCH,
        ),
        Verdict(
            f"relevance {result.keep:g}: at most {100 * MOST_WITHOUT:g} of 100 questions leaves the asked "
            "thing without a token of a region",
            f"{_count(failed, cases)}",
            failed <= MOST_WITHOUT * cases,
        ),
    ]


def markdown(results: Sequence[Result]) -> str:
    """The section of the page."""
    about = (
        f"{results[0].scenes} held-out scenes of 1344x896, 896x1344 and 1024x1024. Each has a code in small "
        "letters, one to three small items, and a large item, and each of these three things is asked about. "
        "The unrelated question is the one about another thing of the same scene, so only the question "
        "differs. The percentile is that of the best asked cell among all cells. The share is that of the "
        "tokens of regions that lie in the asked box; the view of the whole is not a region. A thing is "
        "without a token if no token of a region shows it. At a tenth there is room for nearly all content "
        "of such a scene, whatever is asked; with fewer tokens something has to be left out. Intervals are "
        "95%: of a bootstrap over scenes, and Wilson's for counts."
    )
    tables = (
        f"{result.keep:g} of the tokens kept:\n\n{aligned_markdown(_rows(result))}" for result in results
    )
    return "\n\n".join((about, *tables))


def _rows(result: Result) -> Iterator[list[str]]:
    yield [
        "asked thing", "question", "percentile, participatory", "percentile, relevance", "share of tokens, %",
        "own / unrelated", "without a token",
    ]  # fmt: skip
    for kind in (*KINDS, ALL):
        for name, reading in READINGS.items():
            yield [
                kind,
                name,
                _interval(result.mean(kind, partial(_figure, reading, "participatory", 1))),
                _interval(result.mean(kind, partial(_figure, reading, "relevance", 1))),
                _interval(result.mean(kind, partial(_figure, reading, "share", 100))),
                _interval(result.ratio(kind)) if name == "own" else "",
                _count(*result.without_token(kind, reading)),
            ]


def _figure(reading: Callable[[Pair], Reading], name: str, scale: float, pair: Pair) -> float:
    return scale * float(getattr(reading(pair), name))


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.1f} ({estimate.low:.1f} - {estimate.high:.1f})"


def _count(failed: int, cases: int) -> str:
    low, high = wilson(failed, cases)
    return f"{failed} of {cases} ({100 * low:.1f} - {100 * high:.1f}%)"


def body(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The figures as JSON values."""
    return [
        {
            "keep": result.keep,
            "scenes": result.scenes,
            "kinds": {kind: _figures(result, kind) for kind in (*KINDS, ALL)},
        }
        for result in results
    ]


def _figures(result: Result, kind: str) -> dict[str, Any]:
    pairs = result.of(kind)
    ratio = result.ratio(kind).value
    figures: dict[str, Any] = {"ratio": ratio if isfinite(ratio) else None}
    for name, reading in READINGS.items():
        readings = [reading(pair) for pair in pairs]
        figures[name] = {
            **{
                figure: float(np.mean([getattr(one, figure) for one in readings]))
                for figure in ("participatory", "relevance", "share")
            },
            "without_token": sum(not one.inside for one in readings),
            "questions": len(readings),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="fovea-tiny")
    parser.add_argument("--scenes", type=int, default=SCENES)
    parser.add_argument("--keep", type=lambda text: tuple(map(float, text.split(","))), default=KEEPS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    args = parser.parse_args()
    set_threads(args.threads)
    results = measure(load_model(args.model, EngineConfig()), args.scenes, args.seed, args.keep)
    print(markdown(results))
    print()
    print(json.dumps({"model": args.model, "seed": args.seed, "question": body(results)}))


if __name__ == "__main__":
    main()
