"""Every method of visual-token reduction on the same held-out questions to fovea-tiny, and whether relevance is worth it.

    make bench-relevance     # or: python benchmarks/relevance.py [--count 100] [--detail-count 300] [--methods a,b]

100 questions of each usual kind, and 300 of each kind about small details in images of up to 1344x896: 2,000
in all, each asked under all settings. Writes relevance.json, relevance.md and relevance.png to --out; --docs
FILE: what is between the marks of that document, too. For time's sake (35 minutes on three cores) every
method is asked at 0.5 of the tokens, and at other shares those that have a target or are one's yardstick
there; `fovea eval --sweep` asks any at any. The last line is JSON.
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

from fovea.cli.common import closing
from fovea.cli.questions import Asker
from fovea.cli.sweep.command import LARGE_SCENES, METHODS_SWEPT, large_scenes
from fovea.cli.sweep.measure import SAME_FOR_ALL, SweepRun
from fovea.cli.sweep.plot import draw
from fovea.core.image import PixelBudget
from fovea.engine.engine import Engine
from fovea.engine.visual_budget.methods import method
from fovea.evaluation.datasets import scene_cases
from fovea.evaluation.scenes import DETAIL_KINDS, HELD_OUT_SEED, KINDS
from fovea.evaluation.sweep import FULL, Setting, Sweep
from relevance_cost import measure
from relevance_page import HALF, Cost, body, measured, written_into

ROOT = Path(__file__).resolve().parent.parent
MODEL = "fovea-tiny"
LONGEST_ANSWER = 96
SHARES = {
    "resize": (0.5, 0.25), "uniform": (0.5, 0.25), "random": (0.5, 0.25), "dart": (0.75, 0.5, 0.25), "dpp": (0.75, 0.5, 0.25),
    "relevance": (0.75, 0.5, 0.25),
}  # fmt: skip
"""Of methods that are asked at more than 0.5."""
QUICK = {"count": 1, "detail_count": 1, "timed": 1, "kinds": ("colour",), "methods": ("resize", "relevance")}


def settings(names: tuple[str, ...]) -> tuple[Setting, ...]:
    return FULL, *(Setting(method(name).name, share) for name in names for share in SHARES.get(name, (0.5,)))


def sweep(args: argparse.Namespace) -> Sweep:
    cases = chain(
        scene_cases(args.detail_count, DETAIL_KINDS, args.seed),
        scene_cases(args.count, args.kinds, args.seed),
    )
    total = args.detail_count * len(DETAIL_KINDS) + args.count * len(args.kinds)
    engine = Engine.from_pretrained(MODEL, threads=args.threads, max_queue=0, **SAME_FOR_ALL)
    asker = Asker(engine, LONGEST_ANSWER)
    sweeping = SweepRun(engine, asker, settings(args.methods), PixelBudget(), concurrency=args.concurrency)
    alone = large_scenes(args.timed, args.seed)
    found = asyncio.run(closing(engine, sweeping.run(cases, total, alone, LARGE_SCENES)))
    asker.show_failures()
    if asker.failures:
        raise SystemExit(f"{len(asker.failures)} questions could not be asked; nothing was written")
    return found


def deciding(args: argparse.Namespace) -> Cost:
    torch.set_num_threads(args.threads)
    return measure(MODEL, large_scenes(args.timed, args.seed), HALF.keep)


def head(args: argparse.Namespace, found: Sweep, seconds: float) -> str:
    """How, where and when."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "a CPU")
    details = args.detail_count * len(DETAIL_KINDS)
    return (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, `make bench-relevance` at {commit or 'no commit'}: {MODEL} on "
        f"{cpu}, {args.threads} threads of {os.cpu_count()} cores, {platform.system()}, in {seconds / 60:.0f} minutes. "
        f"{len(found.outcomes):,} held-out questions (seed {args.seed}), {details:,} of them about small details, each asked "
        "with all visual tokens and by every method."
    )


def main() -> int:
    args = arguments()
    started = time.perf_counter()
    cost = deciding(args)
    found = sweep(args)
    how = head(args, found, time.perf_counter() - started)
    args.out.mkdir(parents=True, exist_ok=True)
    chart = args.out / "relevance.png"
    draw(chart, found, f"{MODEL}: {len(found.outcomes):,} questions")
    page = f"# Fewer visual tokens, measured\n\n{measured(found, cost, how, chart.name)}\n"
    result = json.dumps({"model": MODEL, "seed": args.seed, **body(found, cost)})
    (args.out / "relevance.md").write_text(page)
    (args.out / "relevance.json").write_text(result + "\n")
    if args.docs is not None:
        path = Path(os.path.relpath(chart, args.docs.parent)).as_posix()
        args.docs.write_text(written_into(args.docs.read_text(), measured(found, cost, how, path)))
    print(page)
    print(result)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, help="questions of each usual kind")
    parser.add_argument("--detail-count", type=int, default=300, help="of each kind about small details")
    parser.add_argument("--methods", type=lambda text: tuple(text.split(",")), default=METHODS_SWEPT)
    parser.add_argument("--timed", type=int, default=9, help="requests that are timed under each setting")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--docs", type=Path, help="a document with the marks")
    parser.add_argument(
        "--quick", action="store_true", help="three questions, two methods: to see that it works"
    )
    args = parser.parse_args()
    args.kinds = KINDS
    if args.quick:
        vars(args).update(QUICK)
    return args


if __name__ == "__main__":
    sys.exit(main())
