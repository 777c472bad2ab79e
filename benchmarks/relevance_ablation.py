"""Measure what each part of `relevance` contributes: the same questions with one part at a time taken away.

    python benchmarks/relevance_ablation.py [--count 15] [--detail-count 45] [--variants a,b]

There are `--count` questions of each usual kind and `--detail-count` of each kind about small details. A part
is taken away by replacing a function of the engine while the questions are asked; the product has no switches
for this. Accuracies of all variants are compared question by question. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.append(str(Path(__file__).parent))

from fovea.cli.common import run_and_close
from fovea.cli.questions import SAME_FOR_ALL, CaseRunner, Visual
from fovea.cli.sweep import aligned_markdown, difference
from fovea.core.media import Image, PixelBudget, VisualTokens
from fovea.engine.engine import Engine
from fovea.engine.reduce.look import look, usual_heads
from fovea.engine.regions import any_size, relevance_model
from fovea.engine.vision.processor.base import LookPrompt, VisualPlan
from fovea.engine.vision.processor.regions import read_survey
from fovea.engine.visual_budget.choose import VisualBudget
from fovea.evaluation.datasets import Case, scene_cases
from fovea.evaluation.scenes import DETAIL_KINDS, HELD_OUT_SEED, KINDS
from fovea.evaluation.score import PairedCounts
from fovea.evaluation.sweep import ALL, DETAILS, OTHERS, RELEVANCE
from fovea.relevance import knowing, policy
from fovea.relevance.pipeline import Survey, tensions

KEEPS = (0.25, 0.1)
LONGEST_ANSWER = 96
CHUNK = 28
"""Cases that all variants are asked before the next ones are drawn."""
COUNT, DETAIL_COUNT = 15, 45
EVERYTHING = "everything"
Part = Callable[["Chunk"], AbstractContextManager[Any]]
"""Takes a part away while a chunk is asked."""
DraftRequest = tuple[Case, Visual]
"""A case with its decoded images."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Cases that are asked together.

    budget: the engine's component that writes the prompts of a look.
    """

    cases: Sequence[DraftRequest]
    budget: VisualBudget

    def other_questions(self) -> dict[str, str]:
        """The question of the next case with another text, by the identity of the image."""
        texts = [case.exchanges[0].question for case, _ in self.cases]
        others: dict[str, str] = {}
        for place, (_, visual) in enumerate(self.cases):
            later = (text for text in (*texts[place + 1 :], *texts[:place]) if text != texts[place])
            other = next(later, texts[place])
            others |= {one.identity: other for one in visual if isinstance(one, Image)}
        return others


def _without_look(chunk: Chunk) -> AbstractContextManager[Any]:
    return patch.object(chunk.budget, "_look_prompt", lambda image, plan, question: None)


def _shuffled(chunk: Chunk) -> AbstractContextManager[Any]:
    others, usual = chunk.other_questions(), chunk.budget._look_prompt

    def prompt(image: Image, plan: VisualPlan, question: str) -> LookPrompt | None:
        return usual(image, plan, others.get(image.identity, question))

    return patch.object(chunk.budget, "_look_prompt", prompt)


def _usual_heads(chunk: Chunk) -> AbstractContextManager[Any]:
    return patch.object(
        relevance_model,
        "look",
        lambda model, prompt, view, shape, heads: look(
            model, prompt, view, shape, usual_heads(model.decoder.config)
        ),
    )


def _without_map(name: str) -> Part:
    """A survey whose map of that name is zero."""

    def read(image: Any, cell: int) -> Survey:
        survey = read_survey(image, cell)
        zeros = np.zeros(survey.grid, np.float32)
        return (
            replace(survey, propositional=zeros)
            if name == "propositional"
            else replace(survey, perspectival=zeros)
        )

    return lambda chunk: patch.object(any_size, "read_survey", read)


def _fixed(name: str) -> Part:
    """A tension that is 0.5 for every question and image."""

    def fixed(*args: Any) -> Any:
        usual = tensions(*args)
        values = {field: getattr(usual, field) for field in ("compress", "exploit", "focus")}
        return type(usual)(**(values | {name: 0.5}))

    return lambda chunk: patch.object(relevance_model, "tensions", fixed)


VARIANTS: Mapping[str, Part] = {
    EVERYTHING: lambda chunk: nullcontext(),
    "no participatory map (no look)": _without_look,
    "no perspectival map": _without_map("perspectival"),
    "no propositional map": _without_map("propositional"),
    "look with the question of another case": _shuffled,
    "usual heads instead of chosen ones": _usual_heads,
    "compress fixed at 0.5": _fixed("compress"),
    "exploit fixed at 0.5": _fixed("exploit"),
    "focus fixed at 0.5": _fixed("focus"),
    "not along lines of text": lambda chunk: patch.object(
        knowing, "along_lines", lambda values, strokes: values
    ),
    "needs not first": lambda chunk: patch.object(policy, "need", lambda content, about, level: 0),
}
"""What is taken away, by the name of the row in the report."""


@dataclass(frozen=True, slots=True)
class Ablation:
    """The answers of all variants.

    kinds: of each question.
    right: whether each question was answered right, by variant and share of tokens.
    """

    kinds: tuple[str, ...]
    right: Mapping[tuple[str, float], tuple[bool, ...]]

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(variant for variant, _ in self.right))

    @property
    def keeps(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(keep for _, keep in self.right))

    @property
    def groups(self) -> tuple[str, ...]:
        present = {self._group(kind) for kind in self.kinds}
        return (DETAILS, OTHERS, ALL) if len(present) > 1 else (ALL,)

    def answers(self, variant: str, keep: float, group: str = ALL) -> list[bool]:
        pairs = zip(self.kinds, self.right[variant, keep], strict=True)
        return [right for kind, right in pairs if group in (ALL, self._group(kind))]

    def compare(self, variant: str, keep: float, group: str = ALL) -> PairedCounts:
        """A variant against everything, question by question."""
        return PairedCounts.from_answers(
            self.answers(variant, keep, group), self.answers(EVERYTHING, keep, group)
        )

    @staticmethod
    def _group(kind: str) -> str:
        return DETAILS if kind in DETAIL_KINDS else OTHERS


async def ask(
    engine: Engine,
    cases: Iterable[Case],
    variants: Sequence[str] = tuple(VARIANTS),
    keeps: Sequence[float] = KEEPS,
    concurrency: int = 4,
) -> Ablation:
    """Ask all cases with all variants. `EVERYTHING` must be among them. Raises SystemExit for a failure."""
    runner, budget = CaseRunner(engine, LONGEST_ANSWER), engine.parts.preparer.builder._visual_budget
    kinds: list[str] = []
    right: dict[tuple[str, float], list[bool]] = {(v, keep): [] for v in variants for keep in keeps}
    for members in _chunks(cases):
        asked = [(case, visual) for case in members if (visual := await runner.visual(case)) is not None]
        chunk = Chunk(asked, budget)
        kinds += [case.kind for case, _ in asked]
        for variant in variants:
            with ExitStack() as stack:
                # The digest is part of all keys, so no variant finds the decisions of another one in a cache.
                stack.enter_context(patch.object(budget, "_relevance_digest", variant))
                stack.enter_context(VARIANTS[variant](chunk))
                for keep in keeps:
                    right[variant, keep] += await _answers(runner, asked, keep, concurrency)
    if runner.failures:
        runner.show_failures()
        raise SystemExit(f"{len(runner.failures)} questions of the ablation got no answer")
    return Ablation(tuple(kinds), {key: tuple(values) for key, values in right.items()})


async def _answers(
    runner: CaseRunner, asked: Sequence[DraftRequest], keep: float, concurrency: int
) -> list[bool]:
    budget = PixelBudget(visual=VisualTokens(RELEVANCE, keep))
    free = asyncio.Semaphore(concurrency)

    async def one(case: Case, visual: Visual) -> bool:
        async with free:
            return (await runner.run(case, visual, budget)).correct

    return await asyncio.gather(*(one(*pair) for pair in asked))


def _chunks(cases: Iterable[Case]) -> Iterator[list[Case]]:
    left = iter(cases)
    while members := list(islice(left, CHUNK)):
        yield members


def ablation_cases(count: int, detail_count: int, kinds: Sequence[str], seed: int) -> Iterator[Case]:
    return chain(scene_cases(detail_count, DETAIL_KINDS, seed), scene_cases(count, kinds, seed))


def measure(
    model: str, cases: Iterable[Case], variants: Sequence[str], *, threads: int, concurrency: int
) -> Ablation:
    engine = Engine.from_pretrained(model, threads=threads, max_queue=0, **SAME_FOR_ALL)
    work = partial(ask, engine, cases, variants, concurrency=concurrency)
    return asyncio.run(run_and_close(engine, work()))


def markdown(ablation: Ablation) -> str:
    """The section of the page."""
    about = (
        f"{len(ablation.kinds):,} of the questions, each asked with one part of relevance taken away at a "
        "time. A map that is taken away is zero everywhere. Without the look the tension between compress "
        "and particularize has its usual value. With the question of another case, the look alone gets the "
        "other question; the answer is given to the own one. If needs are not first, no region is cut around "
        "its peak either. Differences are from the row with everything, in points, on the same questions, "
        "with 95% intervals (Newcombe, paired) and the p-value of McNemar's exact test."
    )
    tables = (
        f"{keep:g} of the tokens kept:\n\n{aligned_markdown(_rows(ablation, keep))}"
        for keep in ablation.keeps
    )
    return "\n\n".join((about, *tables))


def _rows(ablation: Ablation, keep: float) -> Iterator[list[str]]:
    groups = ablation.groups
    yield ["taken away", *(f"{group}, %" for group in groups), *(f"{group}, difference" for group in groups)]
    for variant in ablation.variants:
        answers = [ablation.answers(variant, keep, group) for group in groups]
        yield [
            "nothing" if variant == EVERYTHING else variant,
            *(f"{100 * sum(right) / len(right):.1f}" for right in answers),
            *(
                "" if variant == EVERYTHING else difference(ablation.compare(variant, keep, group))
                for group in groups
            ),
        ]


def body(ablation: Ablation) -> list[dict[str, Any]]:
    """The figures as JSON values."""
    return [
        {
            "variant": variant,
            "keep": keep,
            "group": group,
            "accuracy": sum(answers) / len(answers),
            **asdict(ablation.compare(variant, keep, group)),
        }
        for variant, keep in ablation.right
        for group in ablation.groups
        for answers in [ablation.answers(variant, keep, group)]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="fovea-tiny")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--detail-count", type=int, default=DETAIL_COUNT)
    parser.add_argument("--variants", type=lambda text: tuple(text.split(",")), default=())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    args = parser.parse_args()
    unknown = sorted(set(args.variants) - set(VARIANTS))
    if unknown:
        parser.error(f"unknown variant {unknown[0]!r}; accepted: {', '.join(VARIANTS)}")
    variants = tuple(dict.fromkeys((EVERYTHING, *(args.variants or VARIANTS))))
    cases = ablation_cases(args.count, args.detail_count, KINDS, args.seed)
    ablation = measure(args.model, cases, variants, threads=args.threads, concurrency=args.concurrency)
    print(markdown(ablation))
    print()
    print(json.dumps({"model": args.model, "seed": args.seed, "ablation": body(ablation)}))


if __name__ == "__main__":
    main()
