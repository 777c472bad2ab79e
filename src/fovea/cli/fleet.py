r"""fovea cluster simulate: hundreds of replicas behind the gateway's own routing, on a virtual clock.

Compare policies of the gateway, separate encoders, autoscaling and losses of machines
before any machine is rented. A million requests take minutes of one core. Times of
a replica are those that the planner derives for --model on --hardware, or those of
a cost model (--cost; default: fovea-tiny on a CPU).

  fovea cluster simulate --replicas 20 --rate 100 \
      --model Qwen/Qwen2.5-VL-7B-Instruct --hardware L40S
  fovea cluster simulate --replicas 20 --rate 100 --route events --preempted 2
  fovea cluster simulate --replicas 4 --rate 60 --requests 216000 \
      --shape daily --day-s 3600 --autoscale --replicas-max 20

The table has one column per --route. docs/cluster.md says what is simulated.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fovea.cli import options
from fovea.cli.common import add_bounds
from fovea.cli.text import HelpFormatter, aligned, fitted
from fovea.cluster.fleet.load import Load, TraceLoad
from fovea.cluster.fleet.replica import ReplicaSpec
from fovea.cluster.fleet.report import OUTCOMES, FleetFigures
from fovea.cluster.fleet.simulate import ROUTES, Conditions, PaperFleet, simulate_paper_fleet
from fovea.cluster.scaling import ScaleSettings
from fovea.core.errors import ConfigError
from fovea.core.trace import read_trace
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.simulate.fleet import Fleet
from fovea.engine.simulate.run import Bounds
from fovea.planner.cost import CostModel
from fovea.planner.hardware import find, known_hardware
from fovea.planner.option import evaluate
from fovea.planner.precision import RECIPES
from fovea.planner.roofline import Setup
from fovea.planner.workload import Kind, Workload

ENGINE = frozenset(
    (
        "kv_cache_mib", "kv_blocks", "block_size", "embed_cache_mib", "max_running", "max_queue",
        "max_step_tokens", "pace",
    )
)  # fmt: skip
"""Settings of the engine that a simulated replica honours."""
DEFAULT = ("round-robin", "cache-affine", "events")
SIDE = 896
"""Side in pixels of the image around which the planner computes the times of steps."""


def add_simulate(actions: Any) -> None:
    """Add `simulate` to the actions of `fovea cluster`."""
    parser = actions.add_parser(
        "simulate",
        help="compare routing, scaling and losses on a virtual clock",
        description=__doc__,
        usage="fovea cluster simulate --replicas N --rate X [--route NAME ...] [OPTIONS]",
    )
    parser.formatter_class = HelpFormatter
    parser.add_argument(
        "--route",
        action="append",
        metavar="NAME",
        dest="routes",
        help=f"one of {', '.join(ROUTES)}; several times for a column each (default: {', '.join(DEFAULT)})",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests as JSON lines instead of a load, see docs/simulator.md",
    )
    parser.add_argument("--cost", type=Path, metavar="FILE", help="cost model of a replica")
    parser.add_argument("--model", metavar="NAME", help="a model that fovea plan knows, or a folder")
    parser.add_argument("--hardware", metavar="NAME", help="a device that fovea plan knows; needs --model")
    parser.add_argument(
        "--price", type=float, metavar="X", help="US dollars per replica and hour (default: the device's)"
    )
    add_bounds(parser, ttft_ms=1500.0)
    parser.add_argument(
        "--autoscale",
        action="store_true",
        help="add and remove replicas by their signals; needs --replicas-max",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options.add_options(parser, "load", Load)
    options.add_options(parser, "fleet", Fleet)
    options.add_options(parser, "conditions", Conditions)
    options.add_options(parser, "autoscaling", ScaleSettings)
    options.add_options(parser, "engine:", EngineConfig, only=ENGINE)
    parser.set_defaults(run=run_simulate)


def run_simulate(args: argparse.Namespace) -> int:
    """Simulate a fleet under each policy, and print a table. Returns 0."""
    spec, price = replica_of(args)
    load = load_of(args)
    fleets = {route: fleet_of(args, spec, price, route) for route in dict.fromkeys(args.routes or DEFAULT)}
    began = time.process_time()
    found = {route: simulate_paper_fleet(fleet, load) for route, fleet in fleets.items()}
    seconds = time.process_time() - began
    if args.json:
        print(json.dumps({"routes": {route: figures.as_dict() for route, figures in found.items()}}))
        return 0
    head = (
        f"{load.requests:,} requests, {load.rate:.4g}/s in the mean; costs: "
        f"{spec.cost.made_from}; simulated in {seconds:.1f} s of one core; "
        f"good: first token within {args.ttft_ms:g} ms, then {args.itl_ms:g} ms per token"
    )
    print(f"{fitted(head)}\n")
    print(table(found))
    return 0


def load_of(args: argparse.Namespace) -> Load | TraceLoad:
    """Return the load of the flags, or of the trace. Raises ConfigError if both are given."""
    if args.trace is None:
        return options.flag_settings(Load, args)
    given = options.flag_values(Load, args)
    if given:
        raise ConfigError(
            f"either --trace or a load, not both: {options.flag(next(iter(given)))} is given too",
            param="trace",
        )
    return TraceLoad(read_trace(args.trace))


def replica_of(args: argparse.Namespace) -> tuple[ReplicaSpec, float | None]:
    """Return the abilities of a replica, and its price per hour.

    Raises ConfigError for flags that contradict each other, and for a model that does not fit.
    """
    if args.price is not None and not 0 <= args.price < math.inf:
        raise ConfigError(f"--price is {args.price:g}; accepted: US dollars from 0 on", param="price")
    given = options.flag_values(EngineConfig, args, ENGINE)
    if args.model is None:
        if args.hardware is not None:
            raise ConfigError("--hardware needs --model", param="hardware")
        cost = CostModel.load(args.cost) if args.cost else CostModel()
        return ReplicaSpec.of(EngineConfig.of(**given), cost), args.price
    if args.cost is not None or args.hardware is None:
        raise ConfigError("--model needs --hardware, and takes no --cost", param="model")
    from fovea.cli.plan.inputs import find_model

    model = find_model(args.model)
    device = find(args.hardware, known_hardware())
    kind = Kind("request", images=((SIDE, SIDE),) if model.shape.takes_images else ())
    option = evaluate(Setup(model.shape, device, RECIPES["none"]), Workload((kind,)), model.count)
    if option.problem:
        raise ConfigError(f"{args.model} on {device.name}: {option.problem}", param="model")
    if not {"kv_cache_mib", "kv_blocks"} & given.keys():
        given["kv_cache_mib"] = max(1, option.capacity.kv // MIB)
    price = device.price if args.price is None else args.price
    return ReplicaSpec.of(EngineConfig.of(**given), option.cost), price


def fleet_of(args: argparse.Namespace, spec: ReplicaSpec, price: float | None, route: str) -> PaperFleet:
    """Return the fleet of one policy. Raises ConfigError for flags that mean nothing together."""
    if args.replicas is None:
        raise ConfigError(
            "--replicas is missing; accepted: the number of engines that answer", param="replicas"
        )
    for name in ("ttft_ms", "itl_ms"):
        if not 0 < getattr(args, name) < math.inf:
            raise ConfigError(
                f"{options.flag(name)} is {getattr(args, name):g}; accepted: above 0", param=name
            )
    scaling = options.flag_values(ScaleSettings, args)
    if scaling and not args.autoscale:
        raise ConfigError(f"{options.flag(next(iter(scaling)))} needs --autoscale", param=next(iter(scaling)))
    size = options.flag_settings(Fleet, args)
    scale = options.flag_settings(ScaleSettings, args) if args.autoscale else None
    if scale is not None and scale.replicas_max < size.replicas:
        raise ConfigError(
            f"--autoscale begins with --replicas {size.replicas}; accepted: --replicas-max from there on",
            param="replicas_max",
        )
    return PaperFleet(
        spec,
        size,
        route,
        conditions=options.flag_settings(Conditions, args),
        scale=scale,
        bounds=Bounds(args.ttft_ms / 1e3, args.itl_ms / 1e3),
        price_per_h=price,
    )


def _row(
    name: str, value: Callable[[FleetFigures], float | None], form: str
) -> tuple[str, Callable[[FleetFigures], str]]:
    def cell(figures: FleetFigures) -> str:
        found = value(figures)
        return "-" if found is None or math.isnan(found) else format(found, form)

    return name, cell


ROWS = (
    _row("requests", lambda f: f.requests, ",d"),
    _row("virtual seconds", lambda f: f.seconds, ",.0f"),
    _row("good answers/s", lambda f: f.goodput, ",.2f"),
    *(_row(outcome, lambda f, outcome=outcome: f.share(outcome), ".2%") for outcome in OUTCOMES),  # type: ignore[misc]
    _row("TTFT p50 ms", lambda f: 1e3 * f.ttft_p50_s, ",.1f"),
    _row("TTFT p99 ms", lambda f: 1e3 * f.ttft_p99_s, ",.1f"),
    _row("ITL p50 ms", lambda f: 1e3 * f.itl_p50_s, ",.2f"),
    _row("ITL p99 ms", lambda f: 1e3 * f.itl_p99_s, ",.2f"),
    _row("output tokens/s", lambda f: f.tokens_per_s, ",.1f"),
    _row("encoder hits", lambda f: f.encoder_hits, ".1%"),
    _row("prefix hits", lambda f: f.prefix_hits, ".1%"),
    _row("images encoded", lambda f: f.images_encoded, ",d"),
    _row("retries", lambda f: f.retries, ",d"),
    _row("most replicas", lambda f: f.most_replicas, ",d"),
    _row("replica hours", lambda f: f.replica_hours, ",.2f"),
    _row("US dollars", lambda f: f.cost, ",.2f"),
    _row("US dollars per 1,000 good", lambda f: f.cost_per_1000, ",.4f"),
)


def table(found: dict[str, FleetFigures]) -> str:
    """Return a table with a column per policy."""
    rows = [["", *found], *([name, *map(cell, found.values())] for name, cell in ROWS)]
    return aligned(rows)
