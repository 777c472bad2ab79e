"""Compare all methods of visual-token reduction on the same held-out questions to fovea-tiny.

    make bench-relevance     # or:
    python benchmarks/relevance.py [--count 100] [--detail-count 300] [--methods a,b]

There are 100 questions of each usual kind, and 300 of each kind about small details in images of up to
1344x896: 2,000 in all, each asked with all settings. The script writes relevance.json, relevance.md and
relevance.png to --out. To save time (35 minutes on three cores), every method is measured at 0.5 of the
tokens; at other shares only methods that have a target there or that a target compares with are measured.
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
from itertools import chain
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))

from fovea.cli.common import run_and_close
from fovea.cli.questions import SAME_FOR_ALL, CaseRunner, SweepRun
from fovea.cli.sweep import LARGE_SCENES, METHODS_SWEPT, draw, large_scenes
from fovea.core.media import PixelBudget
from fovea.engine.engine import Engine
from fovea.engine.visual_budget.methods import find_method
from fovea.evaluation.datasets import scene_cases
from fovea.evaluation.scenes import DETAIL_KINDS, HELD_OUT_SEED, KINDS
from fovea.evaluation.sweep import FULL, Setting, Sweep
from relevance_cost import measure
from relevance_page import HALF, Cost, body, report

ROOT = Path(__file__).resolve().parent.parent
MODEL = "fovea-tiny"
LONGEST_ANSWER = 96
SHARES = {
    "resize": (0.5, 0.25), "uniform": (0.5, 0.25), "random": (0.5, 0.25), "dart": (0.75, 0.5, 0.25),
    "dpp": (0.75, 0.5, 0.25), "relevance": (0.75, 0.5, 0.25),
}  # fmt: skip
"""Shares of tokens at which methods are measured; those not listed only at 0.5."""
QUICK = {"count": 1, "detail_count": 1, "timed": 1, "kinds": ("colour",), "methods": ("resize", "relevance")}


def settings(names: tuple[str, ...]) -> tuple[Setting, ...]:
    return FULL, *(
        Setting(find_method(name).name, share) for name in names for share in SHARES.get(name, (0.5,))
    )


def sweep(args: argparse.Namespace) -> Sweep:
    cases = chain(
        scene_cases(args.detail_count, DETAIL_KINDS, args.seed),
        scene_cases(args.count, args.kinds, args.seed),
    )
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
    torch.set_num_threads(args.threads)
    return measure(MODEL, large_scenes(args.timed, args.seed), HALF.keep)


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
    started = time.perf_counter()
    cost = decision_cost(args)
    result = sweep(args)
    first = head(args, result, time.perf_counter() - started)
    args.out.mkdir(parents=True, exist_ok=True)
    chart = args.out / "relevance.png"
    draw(chart, result, f"{MODEL}: {len(result.outcomes):,} questions")
    page = f"# Fewer visual tokens, measured\n\n{report(result, cost, first, chart.name)}\n"
    line = json.dumps({"model": MODEL, "seed": args.seed, **body(result, cost)})
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
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument(
        "--quick", action="store_true", help="three questions and two methods, to see that it works"
    )
    args = parser.parse_args()
    args.kinds = KINDS
    if args.quick:
        vars(args).update(QUICK)
    return args


if __name__ == "__main__":
    sys.exit(main())
