"""fovea eval --sweep: every method of visual-token reduction on the same questions, at several shares.

The result is a table, and a chart of accuracy against visual tokens kept and against the time to the first
token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.bench.plot import check_plot, figure, save
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
from fovea.cli.questions import (
    SAME_FOR_ALL,
    CaseRunner,
    SweepRun,
    check_data,
    check_images,
    requested_kinds,
)
from fovea.cli.text import aligned, fitted
from fovea.core.errors import InvalidRequest
from fovea.core.markdown import markdown_table
from fovea.core.media import AUTO
from fovea.engine.visual_budget.methods import METHODS, find_method
from fovea.evaluation.datasets import Case, read_jsonl, scene_cases
from fovea.evaluation.scenes import DETAIL_KINDS, HELD_OUT_SEED, KINDS
from fovea.evaluation.score import PairedCounts
from fovea.evaluation.sweep import ALL, FULL, RELEVANCE, SHARES, Keep, Score, Setting, Sweep
from fovea.evaluation.sweep import settings as sweep_settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes


DIFFERENCES = (
    "Differences in accuracy between two settings on the same questions, first minus second, in points, "
    "with 95% intervals (Newcombe, paired) and the p-value of McNemar's exact test"
)


def sweep_text(sweep: Sweep, table: Callable[[Sequence[Sequence[str]]], str]) -> str:
    """Return tables of accuracy, tokens and times per setting, of accuracy per kind, and of comparisons.

    table: writes rows, the first of which is the head, as text.
    """
    parts = [
        table(list(_settings_table(sweep))),
        fitted(f"Times are medians of {sweep.time(FULL).requests} requests, {sweep.timed_on}."),
    ]
    shares = dict.fromkeys(setting.keep for setting in sweep.settings if setting != FULL)
    for keep in shares:
        kept = "as many tokens as the question needs" if keep == AUTO else f"{keep:g} of the tokens"
        parts += [f"Per kind, {kept} kept:", table(list(_kinds_table(sweep, keep)))]
    if sweep.pairs:
        parts += [fitted(f"{DIFFERENCES}:"), table(list(_pairs_table(sweep)))]
    return "\n\n".join(parts)


def aligned_markdown(entries: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns. The first row is the head."""
    head, *rows = entries
    return markdown_table(head, rows, aligned=True)


def points(low: float, high: float) -> str:
    """Return an interval of accuracies in percent."""
    return f"{100 * low:.1f} - {100 * high:.1f}"


def _settings_table(sweep: Sweep) -> Iterator[list[str]]:
    yield [
        "setting", *(f"{group}, % (95%)" for group in sweep.groups),
        "visual tokens", "TTFT, ms", "preprocess", "encoder", "prefill",
    ]  # fmt: skip
    for setting in sweep.settings:
        scores = [sweep.score(setting, group) for group in sweep.groups]
        timed = sweep.time(setting)
        times = timed.ttft, timed.preprocess, timed.encode, timed.prefill
        yield [
            setting.name,
            *map(_accuracy, scores),
            f"{scores[-1].tokens:.0f}",
            *(f"{1e3 * seconds:.1f}" for seconds in times),
        ]


def _kinds_table(sweep: Sweep, keep: Keep) -> Iterator[list[str]]:
    shown: list[Setting] = [FULL, *(one for one in sweep.settings if one != FULL and one.keep == keep)]
    yield ["kind", *(setting.method or FULL.name for setting in shown)]
    for kind in (*sweep.kinds, ALL):
        scores = [sweep.score(setting, kind) for setting in shown]
        yield [kind, *(f"{100 * score.accuracy:.1f}" for score in scores)]


def _pairs_table(sweep: Sweep) -> Iterator[list[str]]:
    yield ["first", "second", *sweep.groups]
    for pair in sweep.pairs:
        compared = [sweep.compare(*pair, group).counts for group in sweep.groups]
        yield [*(setting.name for setting in pair), *map(difference, compared)]


def difference(paired: PairedCounts) -> str:
    """Return a difference of accuracies in points, with its interval and p value.

    A p value that would be rounded to 0.000 is shown as "p < 0.001".
    """
    low, high = (100 * end for end in paired.interval)
    p = f"{paired.p_value:.3f}"
    shown = "p < 0.001" if p == "0.000" else f"p {p}"
    return f"{100 * paired.difference:+.1f} ({low:+.1f} to {high:+.1f}), {shown}"


def _accuracy(score: Score) -> str:
    return f"{100 * score.accuracy:.1f} ({points(score.low, score.high)})"


Lines = Mapping[str, Sequence[Setting]]
"""The settings of each method, from all tokens downwards. A setting with the share `AUTO` is alone."""


def draw(path: Path, sweep: Sweep, title: str) -> None:
    """Draw a line per method: accuracy over the tokens kept, for small details and all kinds, and over TTFT.

    Raises ConfigError when the file cannot be written.
    """
    lines = _lines(sweep)
    groups = tuple(dict.fromkeys((sweep.groups[0], ALL)))
    chart = figure(5.4 * (len(groups) + 1), 6.4)
    chart.suptitle(title)
    *kept, times = chart.subplots(1, len(groups) + 1)
    for axes, group in zip(kept, groups, strict=True):
        _panel(axes, sweep, group, lines, partial(_kept, sweep, group))
        axes.set_xlabel("visual tokens kept, %")
    _panel(times, sweep, ALL, lines, lambda setting: 1e3 * sweep.time(setting).ttft)
    times.set_xlabel(f"time to the first token, ms ({sweep.timed_on})")
    chart.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    save(chart, path)


def _kept(sweep: Sweep, group: str, setting: Setting) -> float:
    """Percentage of the visual tokens that a setting keeps; for `AUTO` as measured on the group."""
    if setting.keep != AUTO:
        return 100 * setting.keep
    return 100 * sweep.score(setting, group).tokens / sweep.score(FULL, group).tokens


def _lines(sweep: Sweep) -> Lines:
    lines: dict[str, list[Setting]] = {}
    shares: dict[str, list[tuple[float, Setting]]] = {}
    for setting in sweep.settings:
        if setting.method is None:
            continue
        if setting.keep == AUTO:
            lines[setting.name] = [setting]
        else:
            shares.setdefault(setting.method, [(1.0, FULL)]).append((setting.keep, setting))
    for method, members in shares.items():
        lines[method] = [setting for _, setting in sorted(members, key=lambda member: -member[0])]
    return lines


def _panel(axes: Axes, sweep: Sweep, group: str, lines: Lines, x: Callable[[Setting], float]) -> None:
    from matplotlib import colormaps

    colours = [colormaps["tab20"](place) for place in (*range(0, 20, 2), *range(1, 20, 2))]  # dark ones first
    for place, (method, settings) in enumerate(lines.items()):
        scores = [sweep.score(setting, group) for setting in settings]
        values = [100 * score.accuracy for score in scores]
        style: dict[str, Any] = {"linewidth": 1.2, "color": colours[place % len(colours)]}
        if settings[0].keep == AUTO:
            style = {"linestyle": "none", "markersize": 10, "color": "black", "zorder": 6}
        if method == RELEVANCE:
            style = {"linewidth": 2.6, "color": "black", "zorder": 5}
            spread = [
                [value - 100 * score.low for value, score in zip(values, scores, strict=True)],
                [100 * score.high - value for value, score in zip(values, scores, strict=True)],
            ]
            axes.errorbar(
                [x(setting) for setting in settings], values, spread, fmt="none", color="black", capsize=3
            )
        marker = "*" if settings[0].keep == AUTO else "o"
        axes.plot([x(setting) for setting in settings], values, marker=marker, label=method, **style)
    axes.set_title(group if group != ALL else "all kinds")
    axes.set_ylabel("right answers, %")
    axes.grid(alpha=0.3)


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
        check_images(engine.info, cases.timed)
        name, runner = engine.info.name, CaseRunner(engine, args.max_tokens)
        sweep_run = SweepRun(engine, runner, chosen, budget, concurrency=args.concurrency)
        work = sweep_run.run(cases.cases, cases.total, cases.timed, cases.timed_on)
        sweep = asyncio.run(run_and_close(engine, work))
    runner.show_failures()
    if args.plot is not None:
        draw(args.plot, sweep, f"{name}: {cases.total} questions")
    if args.json:
        seed = None if args.data else args.seed
        print(json.dumps({"model": name, "seed": seed, "failed": len(runner.failures), **sweep.body()}))
    else:
        print(sweep_text(sweep, aligned_markdown if args.markdown else aligned))
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
    return sweep_settings([find_method(name).name for name in chosen], _shares(args.shares))


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
