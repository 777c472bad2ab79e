"""Compare all methods of visual-token reduction on the same held-out questions to a bundled model.

    make bench-relevance     # scenes, with fovea-tiny; or:
    python benchmarks/relevance.py [--count 100] [--detail-count 300] [--methods a,b]
    make bench-relevance DOCUMENTS=1     # pages, with fovea-page; or:
    python benchmarks/relevance.py --documents [--count 2000] [--ablation-count 300] [--methods a,b]

There are 100 questions of each usual kind, and 300 of each kind about small details in images of up to
1344x896: 2,000 in all, each asked with all settings. The script writes relevance.json, relevance.md and
relevance.png to --out. With --docs FILE it also replaces the text between the marks of that document. To save
time (35 minutes on three cores), every method is measured at 0.5 of the tokens; at other shares only methods
that have a target there or that a target compares with are measured. `fovea eval --sweep` measures any method
at any share.

With --documents there are 2,000 questions about held-out pages, as many of each kind, with the methods that
targets compare. Then parts of relevance are left out one by one (relevance_ablation.py). The files are
relevance_documents.json, .md and .png, and the document has marks of its own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))

import relevance_documents as documents
from fovea.cli.common import run_and_close
from fovea.cli.questions import MAX_ANSWER, MAX_DOCUMENT_ANSWER, CaseRunner
from fovea.cli.sweep.command import LARGE_SCENES, METHODS_SWEPT, large_scenes
from fovea.cli.sweep.measure import SAME_FOR_ALL, SweepRun
from fovea.cli.sweep.plot import draw
from fovea.core.bundled import PAGE, TINY
from fovea.core.image import PixelBudget
from fovea.engine.engine import Engine
from fovea.engine.visual_budget.methods import find_method
from fovea.evaluation.datasets import Case, scene_cases
from fovea.evaluation.documents.held_out import LARGE_PAGES, document_cases, large_pages
from fovea.evaluation.documents.questions import KINDS as DOCUMENT_KINDS
from fovea.evaluation.scenes import DETAIL_KINDS, HELD_OUT_SEED, KINDS
from fovea.evaluation.sweep import FULL, Setting, Sweep
from fovea.evaluation.sweep import settings as all_settings
from relevance_ablation import VARIANTS, ablations
from relevance_cost import measure
from relevance_page import BEGIN, END, HALF, Cost, body, replace_between_marks, report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
SHARES = {
    "resize": (0.5, 0.25), "uniform": (0.5, 0.25), "random": (0.5, 0.25), "dart": (0.75, 0.5, 0.25),
    "dpp": (0.75, 0.5, 0.25), "relevance": (0.75, 0.5, 0.25),
}  # fmt: skip
"""Shares of tokens at which methods are measured; those not listed only at 0.5."""
QUICK = {"count": 1, "detail_count": 1, "timed": 1, "kinds": ("colour",), "methods": ("resize", "relevance")}
QUICK_DOCUMENTS = {"count": 3, "ablation_count": 2}


@dataclass(frozen=True, slots=True)
class Material:
    """The questions of a run, and the requests that are timed.

    model: its name. longest: tokens of the longest answer.
    """

    model: str
    cases: Iterable[Case]
    total: int
    timed: list[Case]
    timed_on: str
    longest: int


def settings(names: Sequence[str]) -> tuple[Setting, ...]:
    return FULL, *(
        Setting(find_method(name).name, share) for name in names for share in SHARES.get(name, (0.5,))
    )


def document_settings(names: Sequence[str]) -> tuple[Setting, ...]:
    return all_settings([find_method(name).name for name in names], documents.SHARES)


def scenes(args: argparse.Namespace) -> Material:
    cases = chain(
        scene_cases(args.detail_count, DETAIL_KINDS, args.seed),
        scene_cases(args.count, args.kinds, args.seed),
    )
    total = args.detail_count * len(DETAIL_KINDS) + args.count * len(args.kinds)
    timed = large_scenes(args.timed, args.seed)
    return Material(TINY, cases, total, timed, LARGE_SCENES, MAX_ANSWER)


def sweep(args: argparse.Namespace, material: Material, chosen: Sequence[Setting]) -> Sweep:
    engine = Engine.from_pretrained(material.model, threads=args.threads, max_queue=0, **SAME_FOR_ALL)
    runner = CaseRunner(engine, material.longest)
    sweeping = SweepRun(engine, runner, chosen, PixelBudget(), concurrency=args.concurrency)
    work = sweeping.run(material.cases, material.total, material.timed, material.timed_on)
    result = asyncio.run(run_and_close(engine, work))
    runner.show_failures()
    if runner.failures:
        raise SystemExit(f"{len(runner.failures)} questions got no answer; nothing was written")
    return result


def decision_cost(args: argparse.Namespace, material: Material) -> Cost:
    torch.set_num_threads(args.threads)
    return measure(material.model, material.timed, HALF.keep)


def head(args: argparse.Namespace, model: str, questions: str, seconds: float) -> str:
    """The first paragraph of the page: date, commit, machine, and numbers of questions."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "a CPU")
    command = f"make bench-relevance{' DOCUMENTS=1' if args.documents else ''}"
    return (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, `{command}` at {commit or 'no commit'}: "
        f"{model} on {cpu}, {args.threads} threads on {os.cpu_count()} cores, {platform.system()}; "
        f"the run took {seconds / 60:.0f} minutes. {questions} "
        "each was asked with all visual tokens and with every method."
    )


def measure_scenes(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    material = scenes(args)
    cost = decision_cost(args, material)
    result = sweep(args, material, settings(args.methods))
    details = args.detail_count * len(DETAIL_KINDS)
    questions = (
        f"{material.total:,} held-out questions (seed {args.seed}), {details:,} of them about small details;"
    )
    first = head(args, TINY, questions, time.perf_counter() - started)
    values = body(result, cost)
    write(args, "relevance", result, values, lambda chart: report(result, cost, first, chart), (BEGIN, END))


def measure_documents(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    cases = some_of(args.seed, args.count)
    timed = large_pages(args.timed, args.seed)
    material = Material(PAGE, cases, len(cases), timed, LARGE_PAGES, MAX_DOCUMENT_ANSWER)
    cost = decision_cost(args, material)
    result = sweep(args, material, document_settings(args.methods))
    variants = VARIANTS[:: len(VARIANTS) - 1] if args.quick else VARIANTS
    rows = ablations(PAGE, some_of(args.seed, args.ablation_count), variants, args.threads)
    questions = f"{material.total:,} questions about held-out pages (seed {args.seed});"
    first = head(args, PAGE, questions, time.perf_counter() - started)
    text = partial(documents.report, result, cost, rows, first, scenes=RESULTS / "relevance.json")
    values, marks = documents.body(result, cost, rows), (documents.BEGIN, documents.END)
    write(args, "relevance_documents", result, values, text, marks)


def some_of(seed: int, count: int) -> list[Case]:
    """`count` questions about pages, spread over the kinds as evenly as possible."""
    per_kind = -(-count // len(DOCUMENT_KINDS))
    surplus = per_kind * len(DOCUMENT_KINDS) - count
    kinds = list(DOCUMENT_KINDS)
    fuller, others = kinds[: len(kinds) - surplus], kinds[len(kinds) - surplus :]
    cases = [*document_cases(per_kind, fuller, seed)]
    return cases + ([*document_cases(per_kind - 1, others, seed)] if per_kind > 1 else [])


def write(
    args: argparse.Namespace,
    name: str,
    result: Sweep,
    values: Mapping[str, Any],
    text: Callable[[str], str],
    marks: tuple[str, str],
) -> None:
    """Write chart, page and JSON of a run, and the document if one is given.

    text: returns the Markdown of the run, with the chart at a path. marks: around it in the document.
    """
    model = PAGE if args.documents else TINY
    args.out.mkdir(parents=True, exist_ok=True)
    chart = args.out / f"{name}.png"
    draw(chart, result, f"{model}: {len(result.outcomes):,} questions")
    page = f"# Fewer visual tokens, measured\n\n{text(chart.name)}\n"
    line = json.dumps({"model": model, "seed": args.seed, **values})
    (args.out / f"{name}.md").write_text(page)
    (args.out / f"{name}.json").write_text(line + "\n")
    if args.docs is not None:
        path = Path(os.path.relpath(chart, args.docs.parent)).as_posix()
        args.docs.write_text(replace_between_marks(args.docs.read_text(), text(path), marks))
    print(page)
    print(line)


def main() -> int:
    args = arguments()
    (measure_documents if args.documents else measure_scenes)(args)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", action="store_true", help="pages and fovea-page")
    parser.add_argument(
        "--count",
        type=int,
        help="questions of each usual kind (default: 100); with --documents of all kinds together (2000)",
    )
    parser.add_argument(
        "--ablation-count", type=int, default=300, help="questions per variant of relevance; with --documents"
    )
    parser.add_argument(
        "--detail-count", type=int, default=300, help="questions per kind about small details"
    )
    parser.add_argument("--methods", type=lambda text: tuple(text.split(",")))
    parser.add_argument("--timed", type=int, default=9, help="requests that are timed with each setting")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, help="a document with the marks, to update")
    parser.add_argument(
        "--quick", action="store_true", help="three questions and two methods, to see that it works"
    )
    args = parser.parse_args()
    args.kinds = KINDS
    args.count = args.count or (2000 if args.documents else 100)
    args.methods = args.methods or (documents.METHODS if args.documents else METHODS_SWEPT)
    if args.quick:
        vars(args).update(QUICK | (QUICK_DOCUMENTS if args.documents else {}))
    return args


if __name__ == "__main__":
    sys.exit(main())
