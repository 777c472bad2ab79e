"""Relevance without each of its parts, on pages: how much of the answer is shown in full, and right answers.

A variant replaces how the maps of the three ways of knowing become one, or the tensions. The first figure is
the share of the cells with the answer and its labels (`Exchange.focus`) that a layout shows at full
resolution, over questions about pages of 512 tokens or more; it needs no answer. The second is the share of
right answers at a quarter of the tokens. training/relevance.py reports the first one for scenes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fovea.cli.common import run_and_close
from fovea.cli.questions import MAX_DOCUMENT_ANSWER, CaseRunner
from fovea.cli.sweep.measure import SAME_FOR_ALL, SweepRun
from fovea.cli.sweep.report import difference, table
from fovea.core.image import PixelBudget
from fovea.engine.config import EngineConfig
from fovea.engine.engine import Engine
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.regions.encoder import word_embeddings
from fovea.engine.request.inputs import to_image
from fovea.engine.vision.processor.pixels import resize_to_bytes
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.engine.visual_budget.choose import QUESTION_IDS
from fovea.evaluation.datasets import Case
from fovea.evaluation.pairs import PairedCounts
from fovea.evaluation.sweep import RELEVANCE, Setting
from fovea.relevance import coupling
from fovea.relevance.balancing import Balancer, Tensions, Ways
from fovea.relevance.pipeline import Survey, survey
from fovea.relevance.policy import LARGE_IMAGE, attend, content_mask, first_view, keep_native
from fovea.relevance.reading import couple_by_reading, reads
from fovea.relevance.texture import Map
from relevance_cost import encode_first_view, read_regions

Array = NDArray[Any]
SHARES = (0.1, 0.25, 0.5)
"""Shares of the tokens at which the answer's place is looked for."""
QUARTER = Setting(RELEVANCE, 0.25)


@dataclass(frozen=True, slots=True)
class Variant:
    """Relevance with one part changed.

    combine: returns the map of relevance from the maps, instead of balancing; None: balance them.
    without: the name of the map that is set to 0; "": none.
    tensions: fixed ones; None: those of the question.
    """

    name: str
    combine: Callable[[Ways], Map] | None = None
    without: str = ""
    tensions: Tensions | None = None


VARIANTS = (
    Variant("all of it"),
    Variant("no participatory map", without="participatory"),
    Variant("no perspectival map", without="perspectival"),
    Variant("no propositional map", without="propositional"),
    Variant("participatory alone", lambda ways: ways.participatory),
    Variant("perspectival alone", lambda ways: ways.perspectival),
    Variant("propositional alone", lambda ways: ways.propositional),
    Variant("all tensions fixed at 0.5", tensions=Tensions(0.5, 0.5, 0.5)),
    *(
        Variant(f"compress fixed at {compress:g}", tensions=Tensions(compress, 0.8, 0.6))
        for compress in (0.05, 0.3, 0.6, 0.95)
    ),
)


@dataclass(frozen=True, slots=True)
class Ablation:
    """The figures of one variant.

    shown: for each of SHARES, the mean share of the answer's cells at full resolution.
    right: of each question, whether it was answered right at a quarter of the tokens.
    """

    name: str
    shown: tuple[float, ...]
    right: tuple[bool, ...]


@contextmanager
def changed(variant: Variant) -> Iterator[None]:
    """Every `Balancer` of this process works as the variant says."""
    balance, tensions = Balancer.balance, Balancer.tensions

    def other_balance(self: Balancer, ways: Ways, at: Tensions) -> Map:
        if variant.combine is not None:
            return variant.combine(ways)
        if variant.without:
            ways = replace(ways, **{variant.without: np.zeros_like(ways.propositional)})
        return balance(self, ways, at)

    def other_tensions(self: Balancer, *inputs: Any) -> Tensions:
        return variant.tensions or tensions(self, *inputs)

    Balancer.balance, Balancer.tensions = other_balance, other_tensions  # type: ignore[method-assign]
    try:
        yield
    finally:
        Balancer.balance, Balancer.tensions = balance, tensions  # type: ignore[method-assign]


def ablations(
    name: str, cases: Sequence[Case], variants: Sequence[Variant] = VARIANTS, threads: int = 2
) -> list[Ablation]:
    """The figures of every variant, on the first exchange of each case. name: of the model."""
    loaded = load_model(name, EngineConfig())
    read = [Looked.at(loaded, case) for case in cases if case.exchanges[0].focus]
    large = [looked for looked in read if looked.focus.size >= LARGE_IMAGE]
    rows = []
    for variant in variants:
        with changed(variant):
            shown = tuple(mean(looked.shown(share) for looked in large) if large else 0.0 for share in SHARES)
            rows.append(Ablation(variant.name, shown, answers(name, cases, threads)))
    return rows


def answers(name: str, cases: Sequence[Case], threads: int) -> tuple[bool, ...]:
    """Whether each case is answered right at a quarter of the tokens, by an engine with empty caches."""
    engine = Engine.from_pretrained(name, threads=threads, max_queue=0, **SAME_FOR_ALL)
    run = SweepRun(engine, CaseRunner(engine, MAX_DOCUMENT_ANSWER), (QUARTER,), PixelBudget(), concurrency=4)
    sweep = asyncio.run(run_and_close(engine, run.run(cases, len(cases), cases[:1], "")))
    return tuple(outcome.right[0] for outcome in sweep.outcomes)


@dataclass(frozen=True, slots=True)
class Looked:
    """A page and question, with all that relevance reads.

    focus: 1 for cells that hold a part of the answer, else 0; (rows, columns).
    words: embeddings of the question, (Q, D).
    view: returns the features of the view of the whole with that shape, (tokens, D).
    read: the coupling by a head that reads, (rows, columns); None: the head looks at a view of the whole.
    """

    survey: Survey
    question: str
    focus: Map
    words: Array
    head: Mapping[str, Array] | None
    view: Callable[[tuple[int, int]], Array]
    read: Map | None

    @classmethod
    @torch.inference_mode()
    def at(cls, loaded: LoadedModel, case: Case) -> Looked:
        """Read the first image and exchange of a case."""
        processor, image, exchange = loaded.processor, to_image(case.images[0]), case.exchanges[0]
        assert isinstance(processor, QwenProcessor)
        ((height, width),) = processor.plan(image.width, image.height, PixelBudget()).sizes
        pixels = np.ascontiguousarray(resize_to_bytes(image, height, width, processor.resample))
        surveyed = survey(pixels, processor.factor)
        ids = tuple(loaded.tokenizer.encode(exchange.question)[-QUESTION_IDS:])
        seen: dict[tuple[int, int], Array] = {}

        @torch.inference_mode()
        def view(shape: tuple[int, int]) -> Array:
            if shape not in seen:
                features = encode_first_view(loaded, processor, pixels, surveyed.grid, shape)
                seen[shape] = features.float().numpy()
            return seen[shape]

        words = word_embeddings(loaded.model, ids).float().numpy()
        scale = width / image.width, height / image.height
        focus = focus_map(exchange.focus, scale, surveyed.grid, processor.factor)
        read: Map | None = None
        if loaded.relevance is not None and reads(loaded.relevance):
            read = couple_by_reading(
                loaded.relevance, *read_regions(loaded, processor, pixels, surveyed), words
            )
        return cls(surveyed, exchange.question, focus, words, loaded.relevance, view, read)

    def shown(self, share: float) -> float:
        """The share of the answer's cells that a layout shows at full resolution. share: of the tokens."""
        grid, balancer = self.survey.grid, Balancer(self.head)
        total = max(1, min(self.focus.size - 1, math.ceil(self.focus.size * share)))
        pooled = coupling.normalize(self.words).mean(0) if balancer.learns_tensions else None
        tensions = balancer.tensions(self.question, pooled, self.survey.statistics(total))
        coupled = self.read
        if coupled is None:
            coupled = self._coupled(first_view(grid, total, tensions.compress))
        ways = Ways(self.survey.propositional, self.survey.perspectival, coupled)
        relevance = balancer.balance(ways, tensions)
        content = content_mask(ways.propositional, ways.perspectival)
        if self.read is None:
            layout = attend(relevance, content, total, tensions.compress).layout
        else:
            layout = keep_native(relevance, content, total).layout
        return float(layout.native_cells()[self.focus > 0].mean())

    def _coupled(self, shape: tuple[int, int]) -> Map:
        features = self.view(shape)
        if self.head is None:
            keywords = self.survey.keyword_map(self.question)
            return coupling.couple_without_head(features, self.words, shape, keywords)
        coupled = coupling.couple(self.head, features, self.words)
        return coupling.resample(coupled, shape, self.survey.grid)


def focus_map(
    boxes: Iterable[tuple[float, float, float, float]],
    scale: tuple[float, float],
    grid: tuple[int, int],
    cell: int,
) -> Map:
    """1 for the cells that touch one of the boxes, else 0; (rows, columns). At least one cell is 1.

    boxes: in pixels of the image. scale: pixels of the model's input per pixel, across and down.
    """
    focus = np.zeros(grid, np.float32)
    (across, down), (rows, columns) = scale, grid
    for left, top, right, bottom in boxes:
        first = min(rows - 1, max(0, int(top * down // cell)))
        start = min(columns - 1, max(0, int(left * across // cell)))
        last, end = math.ceil(bottom * down / cell), math.ceil(right * across / cell)
        focus[first : max(first + 1, last), start : max(start + 1, end)] = 1
    return focus


def ablation_table(rows: Sequence[Ablation]) -> str:
    """The figures as a Markdown table. The first row is the one that the others are compared with."""
    head = ["variant", *(f"shown at {share:g}, %" for share in SHARES), "right at 0.25, %", "difference"]
    lines = [head]
    for row in rows:
        paired = PairedCounts.from_answers(row.right, rows[0].right)
        lines.append(
            [
                row.name,
                *(f"{100 * share:.1f}" for share in row.shown),
                f"{100 * mean(row.right):.1f}",
                "" if row is rows[0] else difference(paired),
            ]
        )
    return table(lines)
