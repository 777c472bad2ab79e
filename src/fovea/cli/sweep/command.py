"""fovea eval --sweep: every method of visual-token reduction on the same questions, at several shares."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea.bench.plot import check_plot
from fovea.cli.common import (
    SINGLE_USER,
    check_writable,
    config_file,
    count,
    load_engine,
    names,
    pixel_budget,
    run_and_close,
)
from fovea.cli.questions import CaseRunner, check_data, requested_kinds
from fovea.cli.sweep.measure import SAME_FOR_ALL, SweepRun
from fovea.cli.sweep.plot import draw
from fovea.cli.sweep.report import markdown
from fovea.core.errors import InvalidRequest
from fovea.engine.visual_budget.methods import METHODS, find_method
from fovea.evaluation.datasets import Case, read_jsonl, scene_cases
from fovea.evaluation.scenes import DETAIL_KINDS, HELD_OUT_SEED, KINDS
from fovea.evaluation.sweep import SHARES, Setting, settings

METHODS_SWEPT = tuple(name for name in METHODS if name not in ("dart_k", "views"))
"""Methods by default. dart_k resembles fastv, and views is for questions about several images."""
KINDS_SWEPT = (*KINDS, *DETAIL_KINDS)
LARGE = (1344, 896)
"""Width and height of the scenes that are timed."""
LARGE_SCENES = f"scenes of {LARGE[0]}x{LARGE[1]}"
TIMED = 5


@dataclass(frozen=True, slots=True)
class SweepCases:
    """The cases of a sweep.

    cases: the cases whose answers are scored.
    total: number of these.
    timed: the cases that are timed, one request at a time.
    timed_on: the timed cases in words.
    """

    cases: Iterable[Case]
    total: int
    timed: list[Case]
    timed_on: str


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `fovea eval --sweep`."""
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--sweep",
        action="store_true",
        help="compare methods of --method on the same questions: accuracy, visual tokens and times",
    )
    group.add_argument(
        "--methods",
        metavar="A,B",
        help=f"methods to compare (default: {','.join(METHODS_SWEPT)}); with --sweep",
    )
    group.add_argument(
        "--shares",
        metavar="X,Y",
        help=f"shares of visual tokens that are kept (default: {','.join(map(str, SHARES))}); with --sweep",
    )
    group.add_argument(
        "--timed",
        type=count,
        metavar="N",
        help=f"requests that are timed, alone and with nothing cached (default: {TIMED}); with --sweep",
    )
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a chart; with --sweep")


def check_no_sweep(args: argparse.Namespace) -> None:
    """Raise InvalidRequest if flags of a sweep are given without --sweep."""
    for name in ("methods", "shares", "timed", "plot"):
        if getattr(args, name) is not None:
            raise InvalidRequest(f"--{name} is for --sweep", param=name)


def run(args: argparse.Namespace) -> int:
    chosen = _settings(args)
    file, budget, cases = config_file(args), pixel_budget(args), _cases(args)
    if args.plot is not None:
        check_plot(args.plot)
        check_writable(args.plot)
    with load_engine(args, file, **SINGLE_USER, **SAME_FOR_ALL) as engine:
        name, runner = engine.info.name, CaseRunner(engine, args.max_tokens)
        sweep_run = SweepRun(engine, runner, chosen, budget, concurrency=args.concurrency)
        work = sweep_run.run(cases.cases, cases.total, cases.timed, cases.timed_on)
        sweep = asyncio.run(run_and_close(engine, work))
    runner.show_failures()
    if args.plot is not None:
        draw(args.plot, sweep, f"{name}: {cases.total} questions")
    if not args.json:
        print(markdown(sweep))
        print()
    seed = None if args.data else args.seed
    body: dict[str, Any] = {"model": name, "seed": seed, "failed": len(runner.failures), **sweep.body()}
    print(json.dumps(body))
    return 1 if runner.failures else 0


def _settings(args: argparse.Namespace) -> tuple[Setting, ...]:
    """Return the settings to compare. Raises InvalidRequest for flags that do not fit a sweep."""
    for name, instead in (("method", "--methods"), ("budget", "--shares"), ("wrong", "no such flag")):
        if getattr(args, name):
            raise InvalidRequest(f"--{name} is for a single setting; --sweep takes {instead}", param=name)
    for name in SAME_FOR_ALL:
        if getattr(args, name) is not None:
            raise InvalidRequest(
                f"--{name.replace('_', '-')} would falsify a sweep; leave it out", param=name
            )
    chosen = METHODS_SWEPT if args.methods is None else names(args.methods)
    return settings([find_method(name).name for name in chosen], _shares(args.shares))


def _shares(text: str | None) -> tuple[float, ...]:
    if text is None:
        return SHARES
    try:
        shares = tuple(float(word) for word in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 < share <= 1 for share in shares):
        raise InvalidRequest(
            f"--shares is {text!r}; accepted: numbers above 0, at most 1, as 0.5,0.25", param="shares"
        )
    return shares


def _cases(args: argparse.Namespace) -> SweepCases:
    """Return the questions of a file, or generated scenes. Raises InvalidRequest."""
    timed_count = args.timed or TIMED
    if args.data:
        check_data(args)
        cases = read_jsonl(args.data)
        timed = cases[:timed_count]
        return SweepCases(cases, len(cases), timed, f"the first {len(timed)} of the file")
    if args.seed < HELD_OUT_SEED:
        raise InvalidRequest(
            f"--seed is {args.seed}; a sweep takes held-out scenes: accepted are {HELD_OUT_SEED} and above",
            param="seed",
        )
    kinds = requested_kinds(args, KINDS_SWEPT)
    scenes = scene_cases(args.count, kinds, args.seed, args.video)
    timed = large_scenes(timed_count, args.seed)
    return SweepCases(scenes, args.count * len(kinds), timed, LARGE_SCENES)


def large_scenes(count: int, seed: int) -> list[Case]:
    """Return the generated cases that are timed: small details in large images."""
    per_kind = -(-count // len(DETAIL_KINDS))
    return list(scene_cases(per_kind, DETAIL_KINDS, seed, sizes=(LARGE,)))[:count]
