"""Compare scheduling policies and paces on the simulator, with the same requests. It runs for two minutes.

    python benchmarks/policies.py [--cost FILE] [--seed 0] [--target-ms 10] [--ttft-ms 1000]

1. A target for the gaps between tokens, with text and images at 50% and at 80% of saturation. Four variants:
    "pace", the engine's target for gaps; `BatchRule`, which bounds the batch by the mean of the last ten
    steps; both; neither. No row has the setting `pace`.
2. Mixed load: text chats at 20% of the rate that saturates the machine with text alone, beside new images of
    784 visual tokens (896x896 pixels) at 50% of the rate that saturates it with images alone. Three variants:
    dual queues with pace, dual queues without pace, and first come, first served without pace.

3. Targets for gaps and first tokens with steady and bursty load at 50% to 150% of saturation, while durations
    scatter. Five variants: both targets; the target for gaps without refusals; `BatchRule`; neither; and an
    oracle, which knows all costs in advance. 40 requests before the load are served but not reported.
4. Prompts of 20 tokens beside prompts of 8,000 tokens, which arrive as fast as they can be computed. Two
    policies: dual, which shares steps between both; and first come, first served.

Throughput at saturation is measured separately: all the same requests arrive at once. "Worst gap" is the
longest gap of each answer; p50 and p99 are taken over answers. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fovea.core.measure import percentile
from fovea.core.trace import Trace, TraceRequest, Workload, generate
from fovea.engine.config import EngineConfig
from fovea.engine.schedule.itl_limit import BatchRule
from fovea.engine.simulate.assemble import Oracle
from fovea.engine.simulate.executor import NoiseSettings
from fovea.engine.simulate.report import Report
from fovea.engine.simulate.run import Bounds, simulate, simulated_records
from fovea.planner.cost import CostModel

VISUAL = 784
SHARES = (0.5, 0.8)
CHATS = 0.2
TARGET_SHARES = (0.5, 0.8, 1.0, 1.5)
TARGET_REQUESTS = 400
WARM_UP = 40
SHORT, LONG = 20, 8000
NOISE = NoiseSettings(noise=0.2, stalls=0.005)
FACTORS = (0.6, 0.8, 1.0, 1.25, 1.6, 2.0)
"""Factors from expected to bounded first tokens that the oracle tries."""
BOTH = Workload(requests=1000, prompt_tokens=120, output_tokens=96)
TEXT = Workload(requests=600, text=1.0, prompt_tokens=60, output_tokens=120)
IMAGES = Workload(requests=400, text=0.0, images=10**6, zipf=0.0, visual_tokens=(VISUAL,), output_tokens=16)
MIXES = {
    "dual, pace 3": {"policy": "dual", "pace": 3.0},
    "dual, no pace": {"policy": "dual", "pace": 0},
    "fcfs, no pace": {"policy": "fcfs", "pace": 0},
}


def at_once(trace: Trace) -> Trace:
    return tuple(replace(request, at=0.0) for request in trace)


def merged(one: Trace, other: Trace) -> Trace:
    """Both traces in one, up to the end of the shorter one."""
    until = min(one[-1].at, other[-1].at)
    return tuple(sorted((r for r in (*one, *other) if r.at <= until), key=lambda r: r.at))


def target(cost: CostModel, seed: int, target_ms: int) -> dict[str, Any]:
    """Part 1: a target for the gaps between tokens."""
    results: dict[str, Any] = {}
    bounds = Bounds(itl_s=target_ms / 1e3)
    free = EngineConfig.of(pace=0, max_queue=0)
    load = replace(BOTH, seed=seed)
    most = simulate(at_once(generate(load)), free, cost).requests_per_s
    print(
        f"1. gaps of at most {target_ms} ms; {load.requests} requests, "
        f"half with images of 64, 256 or 1024 tokens; saturation: {most:.2f} requests/s"
    )
    for share in SHARES:
        trace = generate(replace(load, rate=share * most))
        runs: dict[str, tuple[EngineConfig, BatchRule | None]] = {
            "pace": (free.changed(target_itl_ms=target_ms), None),
            "batch rule": (free, BatchRule(target_ms / 1e3, free.schedule.max_running)),
            "both": (
                free.changed(target_itl_ms=target_ms),
                BatchRule(target_ms / 1e3, free.schedule.max_running),
            ),
            "neither": (free, None),
        }
        for name, (config, control) in runs.items():
            report = simulate(trace, config, cost, control=control, bounds=bounds)
            every = report.classes["all"]
            results[f"{name}, {share:.0%}"] = row = {
                "gaps_within": every.gaps_within,
                "gap_p99_ms": every.itl.p99,
                "worst_gap_p50_ms": every.worst_gap.p50,
                "worst_gap_p99_ms": every.worst_gap.p99,
                "ttft_p50_ms": every.ttft.p50,
                "ttft_p99_ms": every.ttft.p99,
                "tokens_per_s": report.tokens_per_s,
            }
            print(
                f"  {share:4.0%}  {name:11} "
                f"gaps within {row['gaps_within']:6.1%}, p99 {row['gap_p99_ms']:6.1f}; "
                f"worst gap p50 {row['worst_gap_p50_ms']:7.1f} p99 {row['worst_gap_p99_ms']:7.1f}; "
                f"TTFT p50 {row['ttft_p50_ms']:7.1f} p99 {row['ttft_p99_ms']:8.1f} ms; "
                f"{row['tokens_per_s']:7.1f} tok/s"
            )
    return results


def mixed(cost: CostModel, seed: int) -> dict[str, Any]:
    """Part 2: text chats beside new images."""
    config = EngineConfig.of(max_queue=0)
    alone = simulate(at_once(generate(replace(IMAGES, seed=seed))), config.changed(pace=0), cost)
    chats = simulate(at_once(generate(replace(TEXT, seed=seed + 1))), config.changed(pace=0), cost)
    rate, talk = alone.requests_per_s / 2, CHATS * chats.requests_per_s
    images = generate(replace(IMAGES, seed=seed, rate=rate))
    trace = merged(generate(replace(TEXT, seed=seed + 1, rate=talk)), images)
    print(
        f"2. {len(trace)} requests: {rate:.2f} images/s of {alone.requests_per_s:.2f} at saturation, "
        f"{talk:.2f} text chats/s of {chats.requests_per_s:.2f}"
    )
    results: dict[str, Any] = {}
    for name, settings in MIXES.items():
        other = config.changed(**settings)
        report, full = simulate(trace, other, cost), simulate(at_once(trace), other, cost)
        results[name] = row = _row(report, full)
        print(
            f"  {name:14} text: gap p50 {row['text_gap_p50_ms']:5.1f} p99 {row['text_gap_p99_ms']:6.1f}, "
            f"worst gap p50 {row['text_worst_p50_ms']:6.1f} p99 {row['text_worst_p99_ms']:6.1f} ms, "
            f"TTFT p50 {row['text_ttft_p50_ms']:6.1f} p99 {row['text_ttft_p99_ms']:7.1f} ms; "
            f"images: TTFT p50 {row['image_ttft_p50_ms']:7.1f} p99 {row['image_ttft_p99_ms']:7.1f} ms; "
            f"{row['tokens_per_s']:6.1f} tok/s, saturated {row['saturated']:6.1f}"
        )
    ours, theirs = results["dual, pace 3"], results["fcfs, no pace"]
    verdict = {
        "gap_ratio": theirs["text_gap_p99_ms"] / ours["text_gap_p99_ms"],
        "worst_gap_ratio": theirs["text_worst_p99_ms"] / ours["text_worst_p99_ms"],
        "throughput_ratio": ours["tokens_per_s"] / theirs["tokens_per_s"],
        "saturated_ratio": ours["saturated"] / theirs["saturated"],
    }
    print(
        f"  text, p99: gap {verdict['gap_ratio']:.1f}x better (target 4x), "
        f"worst gap {verdict['worst_gap_ratio']:.1f}x; throughput under this load "
        f"{verdict['throughput_ratio']:.3f}x, saturated {verdict['saturated_ratio']:.3f}x (target 0.95x)"
    )
    return results | verdict


def _row(report: Report, full: Report) -> dict[str, float]:
    text, images = report.classes["text"], report.classes["new image"]
    return {
        "text_gap_p50_ms": text.itl.p50,
        "text_gap_p99_ms": text.itl.p99,
        "text_worst_p50_ms": text.worst_gap.p50,
        "text_worst_p99_ms": text.worst_gap.p99,
        "text_ttft_p50_ms": text.ttft.p50,
        "text_ttft_p99_ms": text.ttft.p99,
        "image_ttft_p50_ms": images.ttft.p50,
        "image_ttft_p99_ms": images.ttft.p99,
        "tokens_per_s": report.tokens_per_s,
        "saturated": full.tokens_per_s,
    }


def targets(cost: CostModel, seed: int, itl_ms: int, ttft_ms: int) -> dict[str, Any]:
    """Part 3: targets for gaps and first tokens while durations scatter, against an oracle."""
    free = EngineConfig.of(pace=0, max_queue=0)
    bounds = Bounds(ttft_ms / 1e3, itl_ms / 1e3)
    load = replace(BOTH, requests=TARGET_REQUESTS, seed=seed)
    most = simulate(at_once(generate(load)), free, cost, noise=NOISE).requests_per_s
    print(
        f"3. 95% of gaps within {itl_ms} ms, of first tokens within {ttft_ms} ms; durations scatter by "
        f"{NOISE.noise:.0%}, and {NOISE.stalls:.1%} of them take {NOISE.stall_factor:g} times as long; "
        f"saturation: {most:.2f} requests/s"
    )
    results: dict[str, Any] = {}
    asked = free.changed(target_itl_ms=itl_ms, target_ttft_ms=ttft_ms)
    for arrivals, share in itertools.product(("poisson", "burst"), TARGET_SHARES):
        trace = after_warm_up(replace(load, arrivals=arrivals), share, most)

        def run(config: EngineConfig, trace: Trace = trace, **options: Any) -> Report:
            return simulate(trace, config, cost, bounds=bounds, noise=NOISE, warm_up=WARM_UP, **options)

        rule = BatchRule(itl_ms / 1e3, free.schedule.max_running)
        runs = {
            "targets": run(asked),
            "gaps only": run(asked.changed(target_ttft_ms=0)),
            "batch rule": run(free, control=rule),
            "neither": run(free),
        }
        # The oracle knows all costs, and of several fixed factors for first tokens the best one afterwards.
        known = [run(asked, oracle=Oracle(NOISE, factor)) for factor in FACTORS]
        known = [report for report in known if _kept(report)] or known[-1:]
        runs["oracle"] = max(known, key=lambda report: report.classes["all"].finished)
        for name, report in runs.items():
            every = report.classes["all"]
            results[f"{name}, {arrivals}, {share:.0%}"] = row = {
                "gaps_within": every.gaps_within,
                "firsts_within": every.firsts_within,
                "gap_p99_ms": every.itl.p99,
                "ttft_p50_ms": every.ttft.p50,
                "refused": report.refused / load.requests,
                "tokens_per_s": report.tokens_per_s,
            }
            print(
                f"  {arrivals:7} {share:4.0%}  {name:10} gaps within {row['gaps_within']:6.1%}, "
                f"p99 {row['gap_p99_ms']:7.1f} ms; first tokens within {row['firsts_within']:6.1%}, "
                f"p50 {row['ttft_p50_ms']:8.1f} ms; refused {row['refused']:5.1%}; "
                f"{row['tokens_per_s']:7.1f} tok/s"
            )
    rows = [name.removeprefix("targets") for name in results if name.startswith("targets")]
    verdict = {
        "least_gaps_within": min(results[f"targets{row}"]["gaps_within"] for row in rows),
        "least_firsts_within": min(results[f"targets{row}"]["firsts_within"] for row in rows),
        "least_of_oracle": min(
            results[f"targets{row}"]["tokens_per_s"] / results[f"oracle{row}"]["tokens_per_s"] for row in rows
        ),
    }
    print(
        f"  targets: at least {verdict['least_gaps_within']:.1%} of gaps and "
        f"{verdict['least_firsts_within']:.1%} of first tokens within (target 95%), throughput at least "
        f"{verdict['least_of_oracle']:.3f}x the oracle's (target 0.9x)"
    )
    return results | verdict


def short_beside_long(cost: CostModel) -> dict[str, Any]:
    """Part 4: short prompts beside long ones at saturation."""

    def long(at: float) -> TraceRequest:
        return TraceRequest(at=at, text=LONG, output=1)

    def short(at: float) -> TraceRequest:
        return TraceRequest(at=at, text=SHORT, output=1)

    def first_tokens(trace: Trace, policy: str) -> dict[int, list[float]]:
        trace = tuple(sorted(trace, key=lambda request: request.at))
        config = EngineConfig.of(policy=policy, kv_cache_mib=4096, max_queue=0)
        records = simulated_records(trace, config, cost)
        seconds: dict[int, list[float]] = {SHORT: [], LONG: []}
        for request, record in zip(trace, records, strict=True):
            seconds[request.text].append(1000 * (record.tokens[0] - record.arrival))
        return seconds

    alone = first_tokens((long(0.0), short(1000.0)), "dual")
    every = alone[LONG][0] / 1000
    trace = [long(every * number) for number in range(30)]
    trace += [short(every * (0.3 + 0.13 * number)) for number in range(200)]
    results: dict[str, Any] = {"short_alone_ms": alone[SHORT][0], "long_alone_ms": alone[LONG][0]}
    print(f"4. alone: short {alone[SHORT][0]:.1f} ms, long {alone[LONG][0]:.1f} ms")
    for policy in ("dual", "fcfs"):
        for name, values in zip(("short", "long"), first_tokens(tuple(trace), policy).values(), strict=True):
            p50, p99 = (percentile(sorted(values), share) for share in (50, 99))
            results |= {f"{policy}, {name}, p50_ms": p50, f"{policy}, {name}, p99_ms": p99}
            print(f"  {policy:4} {name:5} TTFT p50 {p50:8.1f} p99 {p99:8.1f} ms")
    return results


def after_warm_up(load: Workload, share: float, most: float) -> Trace:
    """Return WARM_UP requests at 30% of saturation, then the load at `share` of it."""
    first = generate(replace(load, requests=WARM_UP, rate=0.3 * most, seed=load.seed + 7, arrivals="poisson"))
    start = first[-1].at + 30 / most
    later = generate(replace(load, rate=share * most))
    return (*first, *(replace(request, at=request.at + start) for request in later))


def _kept(report: Report) -> bool:
    every = report.classes["all"]
    return every.gaps_within >= 0.95 and every.firsts_within >= 0.95


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cost", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-ms", type=int, default=10)
    parser.add_argument("--ttft-ms", type=int, default=1000)
    args = parser.parse_args()
    cost = CostModel.load(args.cost) if args.cost else CostModel()
    print(f"costs: {cost.made_from}")
    results = {
        "target": target(cost, args.seed, args.target_ms),
        "mixed": mixed(cost, args.seed),
        "targets": targets(cost, args.seed, args.target_ms, args.ttft_ms),
        "short_beside_long": short_beside_long(cost),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
