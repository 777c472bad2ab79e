"""fovea experiment: list and show the A/B experiments of a gateway, and decide them."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from fovea.bench.measure import without_nan
from fovea.cli.text import aligned, fitted, list_line
from fovea.core.config_files import read_toml
from fovea.core.errors import ConfigError
from fovea.gateway.experiments.config import CRITERIA, Experiment, read_experiments
from fovea.gateway.experiments.report import numbers, state_values
from fovea.gateway.experiments.statistics import Statistics
from fovea.gateway.experiments.store import ACTIVE, State, Store
from fovea.gateway.experiments.verdict import Result, Verdict, verdicts


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "experiment",
        description=f"{__doc__} The commands work on the gateway's state file, also while it runs; its "
        "processes follow a decision within about a second.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed = actions.add_parser("list", help="list experiments with their states and requests")
    shown = actions.add_parser(
        "show",
        help="show the numbers, the criteria and the verdicts of one experiment",
        description="Show the numbers, the criteria and the verdicts of one experiment. All intervals hold "
        "at all looks together, so an experiment may be looked at as often as one likes.",
    )
    decided = actions.add_parser("decide", help="promote a variant, roll back, or begin again")
    for action in (shown, decided):
        action.add_argument("name", metavar="NAME", help="name of the experiment")
    choices = decided.add_mutually_exclusive_group(required=True)
    choices.add_argument("--promote", metavar="VARIANT", help="send all requests to this variant")
    choices.add_argument("--roll-back", action="store_true", help="send all requests to the baseline")
    choices.add_argument(
        "--reset", action="store_true", help="delete all numbers and begin again; variants may change then"
    )
    for action, run in ((listed, _list), (shown, _show), (decided, _decide)):
        place = action.add_mutually_exclusive_group(required=True)
        place.add_argument("--state", type=Path, metavar="FILE", help="the state file, experiments.sqlite")
        place.add_argument(
            "--config", type=Path, metavar="FILE", help="the gateway's TOML file, which names it"
        )
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=_guarded, work=run)


def _guarded(args: argparse.Namespace) -> int:
    """Run an action on the state file."""
    path = _path(args)
    try:
        with closing(Store(path, create=False)) as store:
            code: int = args.work(args, store)
            return code
    except sqlite3.Error as error:
        raise ConfigError(f"state file {path} cannot be used: {error}", param="state") from error


def _path(args: argparse.Namespace) -> Path:
    if args.state is not None:
        state: Path = args.state
        return state
    config: Path = args.config
    return read_experiments(read_toml(config, param="config"), config.parent).path


def _find(store: Store, name: str) -> Experiment:
    known = store.definitions()
    for experiment in known:
        if experiment.name == name:
            return experiment
    names = ", ".join(experiment.name for experiment in known) or "none, because the file has no experiment"
    raise ConfigError(f"there is no experiment {name!r}; accepted: {names}", param="name")


def _list(args: argparse.Namespace, store: Store) -> int:
    states = store.states()
    rows = []
    for experiment in store.definitions():
        sums, state = store.sums(experiment.name), states[experiment.name]
        requests = {
            variant.name: sums.get(variant.name, Statistics()).requests for variant in experiment.variants
        }
        rows.append(
            {"name": experiment.name, "model": experiment.model, **state_values(state), "requests": requests}
        )
    if args.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        counts = ", ".join(f"{name} {count:,}" for name, count in row["requests"].items())
        print(list_line(f"{row['name']}  {row['model']}  {row['state']}  {counts}"))
    return 0


def _show(args: argparse.Namespace, store: Store) -> int:
    experiment = _find(store, args.name)
    state, sums = store.states()[args.name], store.sums(args.name)
    found = verdicts(experiment, sums)
    rows = [numbers(variant.name, sums.get(variant.name, Statistics())) for variant in experiment.variants]
    if args.json:
        answer = {
            "name": experiment.name,
            "model": experiment.model,
            **state_values(state),
            "variants": rows,
            "verdicts": [without_nan(dataclasses.asdict(each)) for each in found],
        }
        print(json.dumps(answer))
    else:
        _print(experiment, state, rows, found)
    return 0


def _decide(args: argparse.Namespace, store: Store) -> int:
    experiment, now = _find(store, args.name), time.time()
    if args.promote is not None:
        if experiment.variant(args.promote) is None:
            names = ", ".join(variant.name for variant in experiment.variants)
            raise ConfigError(f"--promote is {args.promote!r}; accepted: {names}", param="promote")
        store.promote(args.name, args.promote, "decided by a person", now)
    elif args.roll_back:
        store.end(args.name, "decided by a person", now)
    else:
        store.reset(args.name, "reset by a person", now)
    state = store.states()[args.name]
    if args.json:
        print(json.dumps({"name": args.name, **state_values(state)}))
    else:
        print(f"{args.name}: {state.state}{f' ({state.promoted})' if state.promoted else ''}")
    return 0


def _print(
    experiment: Experiment, state: State, rows: list[dict[str, Any]], found: tuple[Verdict, ...]
) -> None:
    since = datetime.datetime.fromtimestamp(state.changed, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    promoted = f" ({state.promoted})" if state.promoted else ""
    print(fitted(f"{experiment.name}: model {experiment.model}, {state.state}{promoted} since {since}"))
    if state.state != ACTIVE or state.removed:
        print(fitted(f"reason: {state.reason}"))
    print()
    print(aligned(_transposed(rows)))
    for verdict in found:
        removed = " (rolled back)" if verdict.variant in state.removed else ""
        print()
        print(fitted(f"{verdict.variant}{removed} against {experiment.baseline.name}"))
        for each in verdict.reasons:
            print(fitted(f"  {_finding(each, experiment)}"))
        print(fitted(f"verdict: {verdict.decision}: {verdict.words}"))


HEADS = (
    "", "requests", "errors", "latency p50", "latency p95", "latency p99", "TTFT p50", "TTFT p95",
    "prompt tokens", "visual tokens", "answer tokens", "cost of a request", "rating",
)  # fmt: skip
"""Figures of a variant. Tokens are per request."""


def _transposed(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row per figure and a column per variant."""
    return list(zip(HEADS, *map(_cells, rows), strict=True))


def _cells(row: dict[str, Any]) -> list[str]:
    requests = row["requests"] or 1
    return [
        row["variant"],
        f"{row['requests']:,}",
        _shown(row["error_rate"], "{:.2%}"),
        *(_shown(row[name], "{:.3g} s") for name in ("p50_s", "p95_s", "p99_s", "ttft_p50_s", "ttft_p95_s")),
        *(f"{row[f'{each}_tokens'] / requests:,.0f}" for each in ("prompt", "visual", "completion")),
        _shown(row["cost_per_request"], "{:.4g}"),
        _shown(row["rating"], "{:.2f}") + (f" ({row['ratings']:,})" if row["ratings"] else ""),
    ]


def _finding(each: Result, experiment: Experiment) -> str:
    """Say whether a criterion is met, by which estimate and interval."""
    is_share = "error" in each.name
    form = "{:.3%}" if is_share else "{:.3f}"
    met = {True: "yes", False: "no", None: "open"}[each.met]
    is_optional = each.name in CRITERIA and each.name not in experiment.criteria.required
    informs = each.name == "error_difference"
    judged = "" if informs else f", {met} (bound {form.format(each.bound)})"
    return (
        f"{each.name}{' (not required)' if is_optional else ''}{judged}: {each.words}; "
        f"estimate {_shown(each.value, form)}, "
        f"interval {_shown(each.interval.low, form)} to {_shown(each.interval.high, form)}"
    )


def _shown(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return form.format(value) if math.isfinite(value) else "any"
