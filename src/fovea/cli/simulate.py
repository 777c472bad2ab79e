"""fovea simulate: compare policies on thousands of requests in seconds, without a model.

The engine's own scheduler, caches and ITL limit serve a trace on a virtual clock.
A cost model gives the duration of each step (--cost; default: fovea-tiny on a
CPU). The trace is a file, or random, from the flags of the group "load".

  fovea simulate --policy dual --policy fcfs --rate 12
  fovea simulate --policy dual --pace 0 --trace yesterday.jsonl --json
  fovea simulate --policy dual --target-itl-ms 10 --noise 0.2
  fovea simulate --policy dual --encoders 1 --replicas 3 --rate 30

The table has one column per policy. With --encoders it has two: some engines
encode images for those that answer, and as many engines that do everything.
With --json everything is printed as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fovea.cli import options
from fovea.cli.common import add_bounds
from fovea.cli.text import HelpFormatter, aligned, fitted
from fovea.core.errors import ConfigError
from fovea.core.trace import Trace, Workload, generate, read_trace, write_trace
from fovea.engine.config import EngineConfig
from fovea.engine.config.schedule import POLICY_NAMES
from fovea.engine.schedule.itl_limit import BatchRule
from fovea.engine.simulate.assemble import TRACE_SETTINGS, not_simulated
from fovea.engine.simulate.executor import NoiseSettings
from fovea.engine.simulate.fleet import Fleet, FleetReport, simulate_fleet
from fovea.engine.simulate.report import ClassReport, Report, Spread
from fovea.engine.simulate.run import Bounds
from fovea.planner.cost import CostModel

TOO_SLOW = 10**6


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        description=__doc__,
        usage="fovea simulate [--policy NAME ...] [--trace FILE | LOAD] [OPTIONS]",
    )
    parser.formatter_class = HelpFormatter
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        dest="policies",
        help=f"one of {', '.join(POLICY_NAMES)}; several times for a column each (default: dual and fcfs)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests as JSON lines instead of a random load, see docs/simulator.md",
    )
    parser.add_argument("--save-trace", type=Path, metavar="FILE", help="write the requests to a file")
    parser.add_argument(
        "--cost", type=Path, metavar="FILE", help="cost model (default: built in, of fovea-tiny on a CPU)"
    )
    add_bounds(parser, ttft_ms=1000.0)
    parser.add_argument(
        "--batch-rule",
        action="store_true",
        help="limit batches by a simple rule instead of --pace; --target-itl-ms is its target",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options.add_options(parser, "load", Workload)
    options.add_options(parser, "fleet", Fleet)
    options.add_options(parser, "noise", NoiseSettings)
    options.add_options(parser, "engine:", EngineConfig, only=TRACE_SETTINGS - {"policy"})
    accepted = ", ".join(options.flag(name) for name in sorted(TRACE_SETTINGS))
    own = {*options.setting_names(Workload), *options.setting_names(Fleet)}
    refused = [name for name in not_simulated(TRACE_SETTINGS) if name not in own]
    options.refuse_options(parser, refused, f"not simulated; simulated settings of the engine: {accepted}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    policies = args.policies or ["dual", "fcfs"]
    bounds = Bounds(_bound(args.ttft_ms, "--ttft-ms") / 1e3, _bound(args.itl_ms, "--itl-ms") / 1e3)
    cost = CostModel.load(args.cost) if args.cost else CostModel()
    configs = [_config(args, name) for name in dict.fromkeys(policies)]
    trace, noise = _trace(args), options.settings(NoiseSettings, args, {})
    fleets = _fleets(args)
    started = time.perf_counter()
    results = {
        ", ".join(filter(None, (config.schedule.policy, title))): simulate_fleet(
            trace, config, cost, fleet, control=partial(_control, args, config), bounds=bounds, noise=noise
        )
        for config in configs
        for title, fleet in fleets.items()
    }
    reports = {name: result.report for name, result in results.items()}
    wall = time.perf_counter() - started
    if args.json:
        policy_reports = {
            name: result.report.as_dict() | (_transfers(result) if len(fleets) > 1 else {})
            for name, result in results.items()
        }
        print(json.dumps({"requests": len(trace), "cost": asdict(cost), "policies": policy_reports}))
        return 0
    head = (
        f"{len(trace)} requests over {trace[-1].at:.1f} s; costs: {cost.made_from}; "
        f"simulated in {wall:.1f} s; "
        f"good: first token within {args.ttft_ms:g} ms, then {args.itl_ms:g} ms per token"
    )
    print(f"{fitted(head)}\n")
    print(table(reports))
    for name, result in results.items():
        if result.transfers or result.encoders_busy:
            print(fitted(_handed_over(name, result)))
    return 0


def _fleets(args: argparse.Namespace) -> dict[str, Fleet]:
    """Return the fleets to compare by their titles. One alone needs no title."""
    values = options.flag_values(Fleet, args)
    for name in ("transfer_ms", "transfer_mb_s"):
        if name in values and not int(values.get("encoders", 0)):
            raise ConfigError(
                f"{options.flag(name)} is about hand-overs from encoders; accepted beside --encoders N",
                param=name,
            )
    fleet = options.settings(Fleet, args, {})
    return {one.title: one for one in (fleet.integrated, fleet)} if fleet.encoders else {"": fleet}


def _handed_over(name: str, result: FleetReport) -> str:
    mean = result.transfers or math.nan
    return (
        f"{name}: encoders busy {result.encoders_busy:.1%}; {result.transfers} outputs handed over, "
        f"each {result.transfer_bytes / mean / 1e6:.2f} MB in {1e3 * result.transfer_s / mean:.1f} ms"
    )


def _transfers(result: FleetReport) -> dict[str, float]:
    names = ("encoders_busy", "transfers", "transfer_bytes", "transfer_s")
    return {name: getattr(result, name) for name in names}


def _config(args: argparse.Namespace, policy: str) -> EngineConfig:
    """Return the configuration of one policy. An unknown policy is an error of the flag --policy."""
    if policy not in POLICY_NAMES:
        raise ConfigError(f"--policy is {policy!r}; accepted: {', '.join(POLICY_NAMES)}", param="policy")
    fixed: dict[str, Any] = {"policy": policy}
    if args.batch_rule:
        fixed |= {"pace": 0, "target_itl_ms": 0}
    return options.settings(EngineConfig, args, {}, only=TRACE_SETTINGS, **fixed)


def _control(args: argparse.Namespace, config: EngineConfig) -> BatchRule | None:
    if not args.batch_rule:
        return None
    target = options.lookup("target_itl_ms", args, {})
    if target is None:
        raise ConfigError("--batch-rule needs a target: --target-itl-ms N", param="target_itl_ms")
    checked = options.settings(EngineConfig, args, {}, only=TRACE_SETTINGS, policy=config.schedule.policy)
    if not checked.schedule.target_itl_ms:
        raise ConfigError(f"{target[1]} is 0; --batch-rule needs a target from 1 on", param="target_itl_ms")
    return BatchRule(checked.schedule.target_itl_ms / 1e3, config.schedule.max_running)


def _bound(value: float, flag: str) -> float:
    if not 0 < value < TOO_SLOW:
        raise ConfigError(f"{flag} is {value:g}; accepted: milliseconds above 0, below {TOO_SLOW}")
    return value


def _trace(args: argparse.Namespace) -> Trace:
    load_flags = [name for name in options.setting_names(Workload) if getattr(args, name) is not None]
    if args.trace is None:
        trace = generate(options.settings(Workload, args, {}))
    elif load_flags:
        raise ConfigError(
            f"either --trace or a load, not both: --{load_flags[0].replace('_', '-')} is given too"
        )
    else:
        trace = read_trace(args.trace)
    if args.save_trace:
        write_trace(args.save_trace, trace)
    return trace


def _row(name: str, value: Callable[[Report], float], form: str) -> tuple[str, Callable[[Report], str]]:
    return name, lambda report: "-" if math.isnan(value(report)) else format(value(report), form)


TOTALS = (
    _row("virtual seconds", lambda r: r.seconds, ".1f"),
    _row("steps", lambda r: r.steps, "d"),
    _row("busy", lambda r: r.busy, ".1%"),
    _row("output tokens/s", lambda r: r.tokens_per_s, ".1f"),
    _row("answers/s", lambda r: r.requests_per_s, ".2f"),
    _row("good answers/s", lambda r: r.goodput, ".2f"),
    _row("prefix hits", lambda r: r.prefix_hits, ".1%"),
    _row("encoder hits", lambda r: r.encoder_hits, ".1%"),
    _row("images not encoded again", lambda r: r.images_spared, ".1%"),
    _row("images encoded", lambda r: r.images_encoded, "d"),
    _row("preemptions", lambda r: r.preemptions, "d"),
    _row("refused", lambda r: r.refused, "d"),
    _row("timed out", lambda r: r.timeouts, "d"),
    _row("most often passed", lambda r: r.most_passed, "d"),
)
SPREADS: tuple[tuple[str, Callable[[ClassReport], Spread]], ...] = (
    ("TTFT ms", lambda c: c.ttft),
    ("gap ms", lambda c: c.itl),
    ("longest gap of each ms", lambda c: c.worst_gap),
    ("end to end ms", lambda c: c.end_to_end),
    ("queue ms", lambda c: c.queue),
)


def table(reports: dict[str, Report]) -> str:
    """Return a table with a column per policy. Spreads are p50 / p90 / p99 / longest."""
    rows = [["", *reports]] + [[name, *map(of, reports.values())] for name, of in TOTALS]
    kinds = dict.fromkeys(kind for report in reports.values() for kind in report.classes)
    for kind in kinds:
        of_kind = [report.classes.get(kind) for report in reports.values()]
        rows.append([f"{kind}: requests", *(str(c.requests) if c else "-" for c in of_kind)])
        for name, spread in SPREADS:
            rows.append([f"  {name}", *(_spread(spread(c)) if c else "-" for c in of_kind)])
        rows.append(["  good", *(_percent(c.good) if c else "-" for c in of_kind)])
        rows.append(["  gaps within", *(_percent(c.gaps_within) if c else "-" for c in of_kind)])
        rows.append(["  first tokens within", *(_percent(c.firsts_within) if c else "-" for c in of_kind)])
    return aligned(rows)


def _spread(spread: Spread) -> str:
    values = (spread.p50, spread.p90, spread.p99, spread.longest)
    return "-" if math.isnan(spread.p50) else " / ".join(f"{value:.1f}" for value in values)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"
