"""Compare all methods of visual-token reduction on the same held-out questions to fovea-tiny.

    make bench-relevance     # or:
    python benchmarks/relevance.py [--count 100] [--detail-count 300] [--methods a,b]

The page has three parts:

  sweep     accuracy, visual tokens and times of all methods
  question  whether the question decides where the tokens go (relevance_question.py)
  ablation  what each part of relevance contributes (relevance_ablation.py)

The sweep has 100 questions of each usual kind, and 300 of each kind about small details in images of up to
1344x896: 2,000 in all, each asked with all settings. The ablation has a part of them. The script writes
relevance.json, relevance.md and relevance.png to --out. To save time (55 minutes on two cores), every method
is measured at 0.5 of the tokens; at other shares only relevance and the methods that a target compares it
with.
`fovea eval --sweep` measures any method at any share. The last line is JSON.
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
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import relevance_ablation
import relevance_question
from fovea.cli.common import run_and_close
from fovea.cli.questions import SAME_FOR_ALL, CaseRunner, SweepRun
from fovea.cli.sweep import LARGE_SCENES, METHODS_SWEPT, draw, large_scenes
from fovea.core.media import PixelBudget
from fovea.engine.config import EngineConfig
from fovea.engine.engine import Engine
from fovea.engine.load import load_model
from fovea.engine.visual_budget.methods import find_method
from fovea.evaluation.scenes import DETAIL_KINDS, HELD_OUT_SEED, KINDS
from fovea.evaluation.sweep import FULL, RELEVANCE, Setting, Sweep
from fovea.kernels.choose import set_threads
from relevance_ablation import Ablation, ablation_cases
from relevance_cost import measure
from relevance_page import AUTOMATIC, RIVALS, Cost, Section, body, report

ROOT = Path(__file__).resolve().parent.parent
MODEL = "fovea-tiny"
LONGEST_ANSWER = 96
SHARES = dict.fromkeys((*RIVALS, RELEVANCE), (0.5, 0.25, 0.1))
"""Shares of tokens at which methods are measured; those not listed only at 0.5."""
QUICK = {
    "count": 1, "detail_count": 1, "timed": 1, "kinds": ("colour",), "methods": ("resize", "relevance"),
    "scenes": 2, "ablation_count": 1, "ablation_detail_count": 1,
    "variants": tuple(relevance_ablation.VARIANTS)[:2],
}  # fmt: skip


def settings(names: tuple[str, ...]) -> tuple[Setting, ...]:
    methods = [find_method(name).name for name in names]
    shares = (Setting(name, share) for name in methods for share in SHARES.get(name, (0.5,)))
    return FULL, *shares, *((AUTOMATIC,) if RELEVANCE in methods else ())


def sweep(args: argparse.Namespace) -> Sweep:
    cases = ablation_cases(args.count, args.detail_count, args.kinds, args.seed)
    total = args.detail_count * len(DETAIL_KINDS) + args.count * len(args.kinds)
    engine = Engine.from_pretrained(MODEL, threads=args.threads, max_queue=0, **SAME_FOR_ALL)
    runner = CaseRunner(engine, LONGEST_ANSWER)
    sweeping = SweepRun(engine, runner, settings(args.methods), PixelBudget(), concurrency=args.concurrency)
    alone = large_scenes(args.timed, args.seed)
    result = asyncio.run(run_and_close(engine, sweeping.run(cases, total, alone, LARGE_SCENES)))
    runner.show_failures()
    if runner.failures:
        raise SystemExit(f"{len(runner.failures)} questions got no answer; nothing was written")
    return result


def decision_cost(args: argparse.Namespace) -> Cost:
    return measure(MODEL, large_scenes(args.timed, args.seed), keep=0.5)


def follows_question(args: argparse.Namespace) -> tuple[relevance_question.Result, ...]:
    return relevance_question.measure(load_model(MODEL, EngineConfig()), args.scenes, args.seed)


def ablate(args: argparse.Namespace) -> Ablation:
    cases = ablation_cases(args.ablation_count, args.ablation_detail_count, args.kinds, args.seed)
    return relevance_ablation.measure(
        MODEL, cases, args.variants, threads=args.threads, concurrency=args.concurrency
    )


def head(args: argparse.Namespace, result: Sweep, seconds: float) -> str:
    """The first paragraph of the page: date, commit, machine, and numbers of questions."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "a CPU")
    details = args.detail_count * len(DETAIL_KINDS)
    return (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, `make bench-relevance` at {commit or 'no commit'}: "
        f"{MODEL} on {cpu}, {args.threads} threads on {os.cpu_count()} cores, {platform.system()}; "
        f"the run took {seconds / 60:.0f} minutes. {len(result.outcomes):,} held-out questions "
        f"(seed {args.seed}), {details:,} of them about small details; "
        "each was asked with all visual tokens and with every method."
    )


def main() -> int:
    args = arguments()
    set_threads(args.threads)
    started = time.perf_counter()
    cost = decision_cost(args)
    result = sweep(args)
    question = follows_question(args)
    ablation = ablate(args)
    first = head(args, result, time.perf_counter() - started)
    others = relevance_question.verdicts(question)
    sections = (
        Section("Does the question matter", relevance_question.markdown(question)),
        Section("What each part contributes", relevance_ablation.markdown(ablation)),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    chart = args.out / "relevance.png"
    draw(chart, result, f"{MODEL}: {len(result.outcomes):,} questions")
    text = report(result, cost, first, chart.name, others, sections)
    page = f"# Fewer visual tokens, measured\n\n{text}\n"
    line = json.dumps(
        {
            "model": MODEL,
            "seed": args.seed,
            "question": relevance_question.body(question),
            "ablation": relevance_ablation.body(ablation),
            **body(result, cost, others),
        }
    )
    (args.out / "relevance.md").write_text(page)
    (args.out / "relevance.json").write_text(line + "\n")
    print(page)
    print(line)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, help="questions of each usual kind")
    parser.add_argument(
        "--detail-count", type=int, default=300, help="questions per kind about small details"
    )
    parser.add_argument("--methods", type=lambda text: tuple(text.split(",")), default=METHODS_SWEPT)
    parser.add_argument("--timed", type=int, default=9, help="requests that are timed with each setting")
    parser.add_argument(
        "--scenes", type=int, default=relevance_question.SCENES, help="scenes with three questions each"
    )
    parser.add_argument(
        "--ablation-count", type=int, default=relevance_ablation.COUNT, help="as --count, for the ablation"
    )
    parser.add_argument(
        "--ablation-detail-count",
        type=int,
        default=relevance_ablation.DETAIL_COUNT,
        help="as --detail-count, for the ablation",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument(
        "--quick", action="store_true", help="three questions and two methods, to see that it works"
    )
    args = parser.parse_args()
    args.kinds, args.variants = KINDS, tuple(relevance_ablation.VARIANTS)
    if args.quick:
        vars(args).update(QUICK)
    return args


if __name__ == "__main__":
    sys.exit(main())
