"""Compare scheduling policies and paces on the simulator, with the same requests. It runs for seconds.

    python benchmarks/policies.py [--cost FILE] [--seed 0] [--target-ms 10]

1. A target for the gaps between tokens, with text and images at 50% and at 80% of saturation. Four variants:
    `Pace`, which bounds a step by its cost; `BatchRule`, which bounds the batch by the mean of the last ten
    steps; both; neither.
2. Mixed load: text chats at 20% of the rate that saturates the machine with text alone, beside new images of
    784 visual tokens (896x896 pixels) at 50% of the rate that saturates it with images alone. Three variants:
    dual queues with pace, dual queues without pace, and first come, first served without pace.

Throughput at saturation is measured separately: all the same requests arrive at once. "Worst gap" is the
longest gap of each answer; p50 and p99 are taken over answers. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fovea.core.trace import Trace
from fovea.core.workload import Workload, generate
from fovea.engine.config import EngineConfig
from fovea.engine.schedule.batch import BatchRule
from fovea.engine.simulate.report import Report
from fovea.engine.simulate.run import Bounds, simulate
from fovea.planner.cost import CostModel

VISUAL = 784
SHARES = (0.5, 0.8)
CHATS = 0.2
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cost", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-ms", type=int, default=10)
    args = parser.parse_args()
    cost = CostModel.load(args.cost) if args.cost else CostModel()
    print(f"costs: {cost.made_from}")
    results = {"target": target(cost, args.seed, args.target_ms), "mixed": mixed(cost, args.seed)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
