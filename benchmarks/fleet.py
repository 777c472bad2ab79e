"""Fleets on paper: every figure and the chart of docs/cluster.md, "A fleet on paper".

    python benchmarks/fleet.py [--only PART,PART] [--requests N] [--chart FILE] [--json FILE]
    python benchmarks/fleet.py --predict-cluster [--replicas 3] [--rate X] [--requests N] [--cost FILE] ...

A replica is a Qwen2.5-VL-7B in bfloat16 on one L40S, with the times that the planner derives from their
shape and rates, and the price of benchmarks' date in planner/hardware.toml. Parts:

  accuracy    the coarse replica beside the engine's scheduler, for the same loads
  routing     1,000,000 requests over 200 replicas, by every policy
  loads       a day pressed into 21 minutes, and bursts, by every policy
  encoders    some replicas only encode images for the others
  spot        machines are taken back with a notice of 30 s
  rack        a fifth of the replicas ends at once
  scaling     autoscaling with cold starts, beside fixed fleets

--predict-cluster predicts a load of a few replicas behind the gateway: --save-trace writes its requests, and
`fovea bench --trace FILE` sends the same ones to a real cluster. Compare the figures of both.

Each part prints tables in Markdown. --requests makes all runs shorter; the page has the figures without it.
--json adds the results to a file, from which --chart draws the parts that it holds.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fovea.bench.plot import figure, save
from fovea.cluster.fleet.load import Load, TraceLoad
from fovea.cluster.fleet.replica import ReplicaSpec
from fovea.cluster.fleet.report import OUTCOMES, FleetFigures
from fovea.cluster.fleet.simulate import ROUTES, Conditions, PaperFleet, simulate_paper_fleet
from fovea.cluster.scaling import ScaleSettings
from fovea.core.trace import Workload as RandomLoad
from fovea.core.trace import generate, read_trace, write_trace
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.simulate.fleet import Fleet, simulate_fleet
from fovea.engine.simulate.run import Bounds
from fovea.planner.cost import CostModel
from fovea.planner.hardware import find, known_hardware
from fovea.planner.option import Option, evaluate
from fovea.planner.precision import RECIPES
from fovea.planner.roofline import Setup
from fovea.planner.workload import Kind, Workload

MODEL, DEVICE = "Qwen/Qwen2.5-VL-7B-Instruct", "L40S"
PER_REPLICA = 6.0
"""Requests per second and replica: where policies differ. See the table of rates in the page."""
BOUNDS = Bounds(ttft_s=1.5, itl_s=0.05)
LOAD = Load(
    visual_tokens=(576, 1024, 1600), prompt_tokens=60, output_tokens=200, system_tokens=300,
    text=0.3, images=100_000, zipf=0.9, turns=2.0, think_s=20.0,
)  # fmt: skip
SMALL, LARGE = 20, 200
"""Replicas of most parts, and of the largest."""
COMPARED = ("round-robin", "least-busy", "cache-affine", "events")
Results = dict[str, Any]


def option() -> Option:
    """Return the planner's figures of one replica."""
    from fovea.cli.plan.inputs import find_model

    model = find_model(MODEL)
    kind = Kind("question", images=((896, 896),), text=60, answer=200, follow_ups=1.0)
    setup = Setup(model.shape, find(DEVICE, known_hardware()), RECIPES["none"])
    return evaluate(setup, Workload((kind,)), model.count)


def spec_of(one: Option) -> ReplicaSpec:
    config = EngineConfig.of(kv_cache_mib=one.capacity.kv // MIB, embed_cache_mib=1024)
    return ReplicaSpec.of(config, one.cost)


def fleet_of(spec: ReplicaSpec, price: float | None, replicas: int, route: str, **other: Any) -> PaperFleet:
    size = other.pop("size", Fleet(replicas))
    return PaperFleet(spec, size, route, bounds=BOUNDS, price_per_h=price, **other)


def run(name: str, fleet: PaperFleet, load: Load) -> tuple[str, FleetFigures]:
    """Simulate a fleet, and print what it took."""
    began = time.process_time()
    figures = simulate_paper_fleet(fleet, load)
    seconds = time.process_time() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"<!-- {name}: {figures.requests:,} requests, {figures.seconds:,.0f} virtual seconds, "
        f"{seconds:.0f} s of one core, {memory} MiB -->",
        flush=True,
    )
    return name, figures


def table(rows: Sequence[tuple[str, FleetFigures]], *, replicas: bool = False) -> str:
    """Return a table in Markdown."""
    head = ["", "good answers/s", "good", "late", "refused", "failed", "TTFT p50 / p99, ms",
            "ITL p50 / p99, ms", "encoder hits", "prefix hits", "$ per 1,000 good"]  # fmt: skip
    if replicas:
        head += ["replica hours", "most replicas"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, one in rows:
        cost = one.cost_per_1000
        cells = [
            name,
            f"{one.goodput:,.1f}",
            *(f"{one.share(outcome):.2%}" for outcome in OUTCOMES),
            f"{1e3 * one.ttft_p50_s:,.0f} / {1e3 * one.ttft_p99_s:,.0f}",
            f"{1e3 * one.itl_p50_s:.1f} / {1e3 * one.itl_p99_s:.1f}",
            f"{one.encoder_hits:.1%}",
            f"{one.prefix_hits:.1%}",
            "-" if cost is None else f"{cost:.3f}",
        ]
        if replicas:
            cells += [f"{one.replica_hours:,.1f}", str(one.most_replicas)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


class Bench:
    """The parts of the page.

    requests: at most so many in each run; 0: as many as the page has.
    """

    def __init__(self, requests: int) -> None:
        one = option()
        self.spec, self.price = spec_of(one), one.setup.hardware.price
        self._most = requests or 10**9

    def load(self, requests: int, replicas: int, **other: Any) -> Load:
        rate = other.pop("per_replica", PER_REPLICA) * replicas
        return replace(LOAD, requests=min(requests, self._most), rate=rate, **other)

    def fleet(self, replicas: int, route: str, **other: Any) -> PaperFleet:
        return fleet_of(self.spec, self.price, replicas, route, **other)

    def accuracy(self) -> Results:
        print("\n### accuracy\n")
        rows = []
        for name, cost, config, load in self._pairs():
            rows.append((name, *compare(cost, config, load)))
        print("| load | figure | engine's scheduler | coarse replica | difference |\n|---|---|---|---|---|")
        for name, real, coarse in rows:
            for key in real:
                off = coarse[key] / real[key] - 1 if real[key] else math.nan
                print(f"| {name} | {key} | {real[key]:.4g} | {coarse[key]:.4g} | {off:+.1%} |")
        return {name: {"real": real, "coarse": coarse} for name, real, coarse in rows}

    def _pairs(self) -> list[tuple[str, CostModel, EngineConfig, Load]]:
        tiny = Load(
            requests=min(800, self._most), rate=9, images=300, zipf=1.1, think_s=2, output_tokens=64,
            prompt_tokens=40, system_tokens=0, visual_tokens=(64, 256, 1024),
        )  # fmt: skip
        config = EngineConfig.of(kv_cache_mib=self.spec.kv_tokens * 57344 // MIB, embed_cache_mib=1024)
        large = replace(LOAD, requests=min(800, self._most), images=2000)
        return [
            ("fovea-tiny on a CPU, 9/s", CostModel(), EngineConfig.of(), tiny),
            ("7B on L40S, 3/s", self.spec.cost, config, replace(large, rate=3)),
            ("7B on L40S, 6/s", self.spec.cost, config, replace(large, rate=6)),
            ("7B on L40S, 9/s", self.spec.cost, config, replace(large, rate=9)),
        ]

    def routing(self) -> Results:
        print(f"\n### routing: {LARGE} replicas, {PER_REPLICA:g} requests/s each\n")
        load = self.load(1_000_000, LARGE)
        rows = [run(route, self.fleet(LARGE, route), load) for route in COMPARED]
        print(table(rows))
        return as_results(rows)

    def rates(self) -> Results:
        print(f"\n### rates: {SMALL} replicas, requests/s each\n")
        rows = [
            run(f"{route}, {rate:g}/s", self.fleet(SMALL, route), self.load(50_000, SMALL, per_replica=rate))
            for rate in (4, 5, 6, 7, 8)
            for route in COMPARED
        ]
        print(table(rows))
        return as_results(rows)

    def loads(self) -> Results:
        print(f"\n### loads: {SMALL} replicas\n")
        shapes = {
            "daily": self.load(100_000, SMALL, shape="daily", day_s=1250, swing=0.6, per_replica=4),
            "bursty": self.load(100_000, SMALL, shape="bursty", burst_factor=2.5, per_replica=4),
        }
        rows = [
            run(f"{name}, {route}", self.fleet(SMALL, route), load)
            for name, load in shapes.items()
            for route in ("round-robin", "cache-affine", "events")
        ]
        print(table(rows))
        return as_results(rows)

    def encoders(self) -> Results:
        print(f"\n### encoders: {SMALL} machines\n")
        rows = []
        for name, options in {
            "mixed": {},
            "images that nobody has seen": {"images": 10_000_000, "zipf": 0.0, "turns": 1.0, "text": 0.2},
        }.items():
            load = self.load(40_000, SMALL, per_replica=5, **options)
            for encoders in (0, 1, 2, 4):
                size = Fleet(SMALL - encoders, encoders)
                fleet = self.fleet(SMALL, "cache-affine", size=size)
                rows.append(run(f"{name}: {size.title}", fleet, load))
        print(table(rows))
        return as_results(rows)

    def spot(self) -> Results:
        print(f"\n### spot: {SMALL} replicas, each taken back four times per hour in the mean\n")
        load = self.load(75_000, SMALL, per_replica=5)
        rows = []
        for route in ("round-robin", "cache-affine", "events"):
            for name, conditions in {
                "no loss": Conditions(),
                "notice of 30 s": Conditions(preempted=4),
                "no notice": Conditions(preempted=4, notice_s=0),
            }.items():
                rows.append(run(f"{route}, {name}", self.fleet(SMALL, route, conditions=conditions), load))
        print(table(rows))
        return as_results(rows)

    def rack(self) -> Results:
        print("\n### rack: 40 replicas, 8 of them end at 250 s\n")
        load = self.load(100_000, 40, per_replica=5)
        conditions = Conditions(rack=8, rack_lost_at=250)
        rows = [run(route, self.fleet(40, route, conditions=conditions), load) for route in COMPARED]
        print(table(rows))
        return as_results(rows, timeline=True)

    def scaling(self) -> Results:
        print("\n### scaling: 60 requests/s in the mean\n")
        shapes = {
            "daily": self.load(100_000, 1, per_replica=60, shape="daily", day_s=1600, swing=0.7),
            "bursty": self.load(100_000, 1, per_replica=60, shape="bursty", burst_factor=2.5),
        }
        rows = []
        for name, load in shapes.items():
            for replicas in (12, 18):
                rows.append(run(f"{name}: {replicas} fixed", self.fleet(replicas, "cache-affine"), load))
            for places, route in ((0.6, "cache-affine"), (0.4, "cache-affine"), (0.4, "events")):
                scale = ScaleSettings(replicas_min=4, replicas_max=40, target_places=places, scale_down_s=120)
                title = f"{name}: scaled at {places:.0%} of places, {route}"
                rows.append(run(title, self.fleet(8, route, scale=scale), load))
        slow = self.load(216_000, 1, per_replica=30, shape="daily", day_s=7200, swing=0.7)
        rows.append(run("slow day: 9 fixed", self.fleet(9, "cache-affine"), slow))
        scale = ScaleSettings(replicas_min=2, replicas_max=40, scale_down_s=120)
        rows.append(run("slow day: scaled by default", self.fleet(4, "cache-affine", scale=scale), slow))
        print(table(rows, replicas=True))
        return as_results(rows, timeline=True)


def compare(cost: CostModel, config: EngineConfig, load: Load) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures of one engine's scheduler and of one coarse replica for the same load."""
    trace, following = load.as_trace()
    began = time.process_time()
    played = simulate_fleet(trace, config, cost, Fleet(1), following=following)
    middle = time.process_time()
    fleet = PaperFleet(ReplicaSpec.of(config, cost), Fleet(1), "cache-affine", bounds=Bounds(1e9, 1e9))
    coarse = simulate_paper_fleet(fleet, load)
    end = time.process_time()
    report, records = played.report, [one for one in played.records if one.reason == "length"]
    ttft = sorted(one.tokens[0] - one.arrival for one in records)
    itl = [(one.tokens[-1] - one.tokens[0]) / (len(one.tokens) - 1) for one in records if len(one.tokens) > 1]
    until = max(one.at for number, one in enumerate(trace) if one.at and number not in _later(following))
    tokens = sum(len(one.tokens) for one in records if one.tokens[-1] <= until)
    real = {
        "TTFT p50, ms": 1e3 * ttft[len(ttft) // 2],
        "TTFT p99, ms": 1e3 * ttft[int(0.99 * len(ttft))],
        "ITL p50, ms": 1e3 * sorted(itl)[len(itl) // 2],
        "output tokens/s": tokens / until,
        "prefix hits, %": 100 * report.prefix_hits,
        "images encoded": report.images_encoded,
        "us of Python per request": 1e6 * (middle - began) / len(trace),
    }
    figures = (
        1e3 * coarse.ttft_p50_s, 1e3 * coarse.ttft_p99_s, 1e3 * coarse.itl_p50_s, coarse.tokens_per_s,
        100 * coarse.prefix_hits, coarse.images_encoded, 1e6 * (end - middle) / len(trace),
    )  # fmt: skip
    return real, dict(zip(real, figures, strict=True))


def _later(following: Mapping[int, Any]) -> set[int]:
    return {one.number for one in following.values()}


def as_results(rows: Sequence[tuple[str, FleetFigures]], *, timeline: bool = False) -> Results:
    found: Results = {}
    for name, one in rows:
        found[name] = one.as_dict()
        if timeline:
            found[name]["timeline"] = [asdict(moment) for moment in one.timeline]
    return found


def draw(path: Path, results: Mapping[str, Results]) -> None:
    """Draw goodput by rate and policy, a lost rack, and replicas over a day."""
    chart = figure(13.2, 8.4)
    rates, hits, rack, day = chart.subplots(2, 2).flat
    for route in COMPARED:
        found = {
            float(name.split(", ")[1].removesuffix("/s")): one
            for name, one in results["rates"].items()
            if name.startswith(f"{route},")
        }
        rates.plot(list(found), [one["goodput"] / SMALL for one in found.values()], marker="o", label=route)
        lost = results["rack"][route]
        moments = [moment for moment in lost["timeline"] if moment["at"] <= lost["seconds"]]
        at = [moment["at"] for moment in moments]
        rack.plot(at, [moment["outcomes"]["good"] / 10 for moment in moments], label=route)
    _labels(rates, "steady load", "requests/s per replica", "good answers/s per replica")
    _labels(rack, "8 of 40 replicas lost at 250 s", "seconds", "good answers/s")
    rack.set_ylim(0)
    at_six = [results["rates"][f"{route}, {PER_REPLICA:g}/s"] for route in COMPARED]
    for offset, key in ((-0.2, "encoder_hits"), (0.2, "prefix_hits")):
        bars = [100 * one[key] for one in at_six]
        hits.bar([place + offset for place in range(len(bars))], bars, 0.4, label=key.replace("_", " "))
    hits.set_xticks(range(len(COMPARED)), COMPARED)
    _labels(hits, f"caches at {PER_REPLICA:g} requests/s per replica", "", "%")
    for name, one in results["scaling"].items():
        if name.startswith("daily: scaled") and "events" not in name:
            moments = one["timeline"]
            label = name.removeprefix("daily: ").removesuffix(", cache-affine")
            day.plot([moment["at"] for moment in moments], [m["replicas"] for m in moments], label=label)
    some = next(iter(results["scaling"].values()))["timeline"]
    ended = [sum(moment["outcomes"].values()) / 10 / PER_REPLICA for moment in some]
    smooth = [fmean(ended[max(0, place - 6) : place + 7]) for place in range(len(ended))]
    day.plot([moment["at"] for moment in some], smooth, label=f"load / {PER_REPLICA:g}", linestyle=":")
    _labels(day, "a day pressed into 27 minutes", "seconds", "replicas that answer")
    save(chart, path)


def _labels(axes: Any, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def predict_cluster(args: argparse.Namespace) -> None:
    """Print what clients of a small cluster should measure."""
    cost = CostModel.load(args.cost) if args.cost else CostModel()
    config = EngineConfig.of(kv_cache_mib=args.kv_cache_mib, embed_cache_mib=args.embed_cache_mib)
    load = TraceLoad(read_trace(args.trace) if args.trace else generate(_workload(args)))
    if args.save_trace:
        write_trace(args.save_trace, load.trace)
    bounds = Bounds(args.ttft_ms / 1e3, args.itl_ms / 1e3)
    fleet = PaperFleet(ReplicaSpec.of(config, cost), Fleet(args.replicas), args.route, bounds=bounds)
    found = simulate_paper_fleet(fleet, load)
    print(f"{args.replicas} replicas, {args.route}; costs: {cost.made_from}")
    for name, value in {
        "answers/s": (found.outcomes["good"] + found.outcomes["late"]) / found.seconds,
        "good answers/s": found.goodput,
        "output tokens/s": found.tokens_per_s,
        "TTFT p50, ms": 1e3 * found.ttft_p50_s,
        "TTFT p99, ms": 1e3 * found.ttft_p99_s,
        "ITL p50, ms": 1e3 * found.itl_p50_s,
        "encoder hits, %": 100 * found.encoder_hits,
        "prefix hits, %": 100 * found.prefix_hits,
        "images encoded": found.images_encoded,
    }.items():
        print(f"{name:20} {value:,.2f}")
    print(json.dumps(found.as_dict()))


def _workload(args: argparse.Namespace) -> RandomLoad:
    return RandomLoad(
        requests=args.requests or 2000, rate=args.rate, text=args.text, images=args.images, zipf=args.zipf,
        visual_tokens=(args.visual_tokens,), prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens, seed=args.seed,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts: dict[str, Callable[[Bench], Results]] = {
        "accuracy": Bench.accuracy, "rates": Bench.rates, "routing": Bench.routing, "loads": Bench.loads,
        "encoders": Bench.encoders, "spot": Bench.spot, "rack": Bench.rack, "scaling": Bench.scaling,
    }  # fmt: skip
    parser.add_argument("--only", default=",".join(parts), help=f"parts: {', '.join(parts)} (default: all)")
    parser.add_argument(
        "--requests", type=int, default=0, help="most requests of a run (default: the page's)"
    )
    parser.add_argument(
        "--chart",
        type=Path,
        help="draw the chart into this file from --json, which must have rates, rack and scaling",
    )
    parser.add_argument("--json", type=Path, help="file of results, to which this run adds its own")
    parser.add_argument("--predict-cluster", action="store_true", help="predict the load of a cluster test")
    group = parser.add_argument_group("--predict-cluster")
    group.add_argument("--replicas", type=int, default=3)
    group.add_argument("--route", choices=ROUTES, default="cache-affine")
    group.add_argument("--cost", type=Path, help="cost model (default: fovea-tiny on a CPU)")
    group.add_argument("--trace", type=Path, help="requests, as `fovea bench --trace` sends them")
    group.add_argument("--save-trace", type=Path, help="write the random requests to a file")
    group.add_argument("--rate", type=float, default=20.0, help="requests per second, all together")
    group.add_argument("--text", type=float, default=0.5, help="share of requests without an image")
    group.add_argument("--images", type=int, default=300, help="distinct images")
    group.add_argument("--zipf", type=float, default=1.1, help="exponent of their popularity")
    group.add_argument("--visual-tokens", type=int, default=256, help="tokens of an image")
    group.add_argument("--prompt-tokens", type=int, default=40, help="mean tokens of a question")
    group.add_argument("--output-tokens", type=int, default=64, help="mean tokens of an answer")
    group.add_argument("--kv-cache-mib", type=int, default=1024)
    group.add_argument("--embed-cache-mib", type=int, default=256)
    group.add_argument("--ttft-ms", type=float, default=1000.0)
    group.add_argument("--itl-ms", type=float, default=50.0)
    group.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.predict_cluster:
        predict_cluster(args)
        return
    results: dict[str, Results] = {}
    if args.json and args.json.exists():
        results = json.loads(args.json.read_text(encoding="utf-8"))
    wanted = [name for name in args.only.split(",") if name]
    bench = Bench(args.requests) if wanted else None
    for name in wanted:
        if name not in parts:
            parser.error(f"--only: {name!r} is no part; accepted: {', '.join(parts)}")
        assert bench is not None
        results[name] = parts[name](bench)
        if args.json:
            args.json.write_text(json.dumps(results), encoding="utf-8")
    if args.chart:
        missing = {"rates", "rack", "scaling"} - results.keys()
        if missing:
            parser.error(f"--chart needs these parts in --json: {', '.join(sorted(missing))}")
        draw(args.chart, results)


if __name__ == "__main__":
    main()
