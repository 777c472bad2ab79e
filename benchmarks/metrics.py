"""Cost of recording metrics: per token, per request and per scrape.

    python benchmarks/metrics.py                      # this tree
    python benchmarks/metrics.py --baseline OTHER/src # and the ratio to another tree's package, in turns

A process measures each tree in turn, several times; the medians are compared. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CALLS, REPEATS = 20_000, 5


def nanoseconds(work: Callable[[], object], calls: int) -> float:
    """Return the shortest mean duration of a call in three runs."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, time.perf_counter() - start)
    return 1e9 * best / calls


def measure() -> dict[str, float]:
    """Return nanoseconds by what is measured, for the package that Python finds."""
    from fovea.core.types import Delta, StageTimings, Usage
    from fovea.observe.metrics import Metrics

    metrics = Metrics(dict, "model", "1.2")
    token = Delta(0, "a", token_ids=(1,))
    last = Delta(0, "", finish_reason="stop", usage=Usage(10, 5, 8, 4), timings=StageTimings(1, 2, 3, 4))

    def one_token() -> None:
        metrics.observe_gap(0.01)
        metrics.observe_delta(token)

    def one_request() -> None:
        metrics.observe_first_token(0.1)
        metrics.observe_delta(last)
        metrics.observe_request("/v1/chat/completions", 200, 0.5)

    return {
        "token_ns": nanoseconds(one_token, CALLS),
        "request_ns": nanoseconds(one_request, CALLS // 10),
        "scrape_ns": nanoseconds(metrics.exposition, 20),
    }


def measure_in(tree: Path) -> dict[str, float]:
    """Measure in a process that finds the package in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, __file__, "--one"]
    figures: dict[str, float] = json.loads(subprocess.check_output(command, env=environment))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="folder of another tree's package")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure()))
        return
    trees = {"here": Path(__file__).resolve().parent.parent / "src"}
    if args.baseline is not None:
        trees["baseline"] = args.baseline.resolve()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(REPEATS):
        for name, tree in trees.items():
            runs[name].append(measure_in(tree))
    medians = {
        name: {key: round(statistics.median(run[key] for run in many)) for key in many[0]}
        for name, many in runs.items()
    }
    report: dict[str, object] = dict(medians)
    if args.baseline is not None:
        report["ratio"] = {
            key: round(medians["here"][key] / medians["baseline"][key], 2) for key in medians["here"]
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
