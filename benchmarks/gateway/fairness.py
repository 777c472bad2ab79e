"""Simulate what a flood of one tenant costs another one, on a virtual clock. It runs for half a minute.

    python benchmarks/gateway/fairness.py [--seeds 3] [--headroom 0.125]

Two tenants share backends. "quiet" uses a small share of the capacity; "flood" offers 20 times as much. Half
of the requests have images: 1,000 to 4,500 tokens each; the others have 200 to 1,500. A request takes 0.3 s
and 0.5 ms per token, times a random factor from 0.7 to 1.4. The times are those of the quiet tenant, from
arrival to end.

1. alone: the quiet tenant without the other one.
2. first come, first served: with the flood, one line for all, the same capacity.
3. order only: deficit round robin, no headroom.
4. order and headroom: the gateway's queue.

Scenarios: "little load" and "much load" differ in the load; "bursts": the quiet tenant sends four requests
at once; "large": every request of the flood has 8,000 to 12,000 tokens; "large, short": and those of the
quiet tenant have 200 to 500; "few": small backends; "slowdown": a request on full backends takes 20% longer
than on empty ones, because of larger batches, which no order of requests can remove. The last line is JSON.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

from fovea.core.measure import percentile
from fovea.gateway.fair_queue import FairQueue, QueueSlot, State
from fovea.gateway.settings import QueueSettings

LARGE, SHORT = (8000, 12_000), (200, 500)
BASE_S, PER_TOKEN_S = 0.3, 0.5e-3
FLOOD = 20


class Scenario(NamedTuple):
    """Backends and the load on them.

    tokens, requests: what they take at once.
    quiet: share of the capacity that the quiet tenant uses. The flood offers 20 times as much.
    large: whether all requests of the flood are large.
    short: whether all requests of the quiet tenant are short.
    burst: requests that the quiet tenant sends at once.
    slowdown: share by which a request takes longer on full backends than on empty ones.
    """

    tokens: int = 65_536
    requests: int = 32
    quiet: float = 0.1
    large: bool = False
    short: bool = False
    burst: int = 1
    slowdown: float = 0.0
    seconds: float = 1000.0


SCENARIOS = {
    "usual": Scenario(),
    "little load": Scenario(quiet=0.05),
    "much load": Scenario(quiet=0.2),
    "bursts": Scenario(burst=4),
    "large": Scenario(large=True),
    "large, short": Scenario(large=True, short=True),
    "few": Scenario(tokens=24_576, requests=8, quiet=0.05),
    "slowdown": Scenario(slowdown=0.2),
}


class Arrival(NamedTuple):
    """A request of the simulation.

    at_s: time of its arrival.
    service_s: seconds that it takes on an empty backend.
    """

    at_s: float
    tenant: str
    cost: int
    service_s: float


class Line(Protocol):
    """A queue under test: the calls of FairQueue that the simulation uses."""

    running_tokens: int

    def enter(self, slot: QueueSlot, now_s: float) -> list[QueueSlot]: ...

    def leave(self, slot: QueueSlot, now_s: float) -> list[QueueSlot]: ...


class Fair:
    """The gateway's queue."""

    def __init__(self, scenario: Scenario, headroom: float) -> None:
        settings = replace(QueueSettings(), queue_headroom=headroom)
        self._queue = FairQueue(settings, scenario.tokens, scenario.requests)

    @property
    def running_tokens(self) -> int:
        return self._queue.running_tokens

    def enter(self, slot: QueueSlot, now_s: float) -> list[QueueSlot]:
        return self._queue.offer(slot, now_s).started

    def leave(self, slot: QueueSlot, now_s: float) -> list[QueueSlot]:
        return self._queue.finish(slot, now_s)


class Fifo:
    """First come, first served, with the same capacity and bounds."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._line: deque[QueueSlot] = deque()
        self._running = 0
        self.running_tokens = 0

    def enter(self, slot: QueueSlot, now_s: float) -> list[QueueSlot]:
        if len(self._line) < QueueSettings().queue_length_per_tenant:
            self._line.append(slot)
        return self._start()

    def leave(self, slot: QueueSlot, now_s: float) -> list[QueueSlot]:
        self._running -= 1
        self.running_tokens -= slot.cost
        return self._start()

    def _start(self) -> list[QueueSlot]:
        started: list[QueueSlot] = []
        while self._line:
            slot = self._line[0]
            tokens, requests = self.running_tokens + slot.cost, self._running + 1
            if tokens > self._scenario.tokens or requests > self._scenario.requests:
                break
            self._line.popleft()
            slot.state = State.RUNNING
            self._running += 1
            self.running_tokens += slot.cost
            started.append(slot)
        return started


def arrivals(scenario: Scenario, tenant: str, share: float, seed: int) -> Iterator[Arrival]:
    """Yield Poisson arrivals that use a share of the capacity."""
    draw = random.Random(f"{tenant}{seed}")
    quiet = tenant == "quiet"
    bounds = SHORT if quiet and scenario.short else LARGE if scenario.large and not quiet else None
    burst = scenario.burst if quiet else 1
    mean_tokens = sum(bounds) / 2 if bounds else 1800
    mean_s = (BASE_S + PER_TOKEN_S * mean_tokens) * 1.05
    per_s = min(scenario.requests, scenario.tokens / mean_tokens) / mean_s
    at_s = 0.0
    while True:
        at_s += draw.expovariate(share * per_s / burst)
        if at_s > scenario.seconds:
            return
        for _ in range(burst):
            cost = draw.randint(*(bounds or ((1000, 4500) if draw.random() < 0.5 else (200, 1500))))
            yield Arrival(at_s, tenant, cost, (BASE_S + PER_TOKEN_S * cost) * draw.uniform(0.7, 1.4))


def simulate(scenario: Scenario, line: Line, requests: list[Arrival]) -> dict[str, list[float]]:
    """Return the seconds of every request that ended, by tenant, in ascending order."""
    waiting: dict[QueueSlot, Arrival] = {}
    ends: list[tuple[float, int, QueueSlot]] = []
    times: dict[str, list[float]] = {}
    todo = deque(requests)
    number = itertools.count()

    def begin(slots: list[QueueSlot], now_s: float) -> None:
        for slot in slots:
            factor = 1 + scenario.slowdown * line.running_tokens / scenario.tokens
            end_s = now_s + waiting[slot].service_s * factor
            heapq.heappush(ends, (end_s, next(number), slot))

    while todo or ends:
        if todo and (not ends or todo[0].at_s <= ends[0][0]):
            request = todo.popleft()
            slot = QueueSlot(request.tenant, 1.0, 0, request.cost)
            waiting[slot] = request
            begin(line.enter(slot, request.at_s), request.at_s)
        else:
            now_s, _, slot = heapq.heappop(ends)
            request = waiting.pop(slot)
            times.setdefault(request.tenant, []).append(now_s - request.at_s)
            begin(line.leave(slot, now_s), now_s)
    return {tenant: sorted(values) for tenant, values in times.items()}


def compare(scenario: Scenario, seed: int, headroom: float) -> dict[str, dict[str, float]]:
    """Return the quiet tenant's p50 and p95 in seconds, and the flood's requests per second, by variant."""
    quiet = list(arrivals(scenario, "quiet", scenario.quiet, seed))
    both = sorted([*quiet, *arrivals(scenario, "flood", scenario.quiet * FLOOD, seed)])
    runs = {
        "alone": simulate(scenario, Fair(scenario, headroom), quiet),
        "first come, first served": simulate(scenario, Fifo(scenario), both),
        "order only": simulate(scenario, Fair(scenario, 0.0), both),
        "order and headroom": simulate(scenario, Fair(scenario, headroom), both),
    }
    return {
        name: {
            "p50_s": percentile(times["quiet"], 50),
            "p95_s": percentile(times["quiet"], 95),
            "flood_per_s": len(times.get("flood", ())) / scenario.seconds,
        }
        for name, times in runs.items()
    }


def mean_of(runs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the mean of several runs, with the ratios of the p95 to that alone."""
    rows = {
        name: {key: sum(run[name][key] for run in runs) / len(runs) for key in row}
        for name, row in runs[0].items()
    }
    for name, row in rows.items():
        row["p95_ratio"] = row["p95_s"] / rows["alone"]["p95_s"]
        row["worst_ratio"] = max(run[name]["p95_s"] / run["alone"]["p95_s"] for run in runs)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of runs; their mean is printed (default: 3)"
    )
    parser.add_argument("--headroom", type=float, default=QueueSettings().queue_headroom)
    args = parser.parse_args()
    results = {}
    for title, scenario in SCENARIOS.items():
        rows = mean_of([compare(scenario, seed, args.headroom) for seed in range(args.seeds)])
        print(f"{title}: quiet {scenario.quiet:.0%}, flood {scenario.quiet * FLOOD:.0%} of the capacity")
        for name, row in rows.items():
            print(
                f"  {name:26} p50 {row['p50_s']:7.3f} s   p95 {row['p95_s']:7.3f} s   "
                f"{row['p95_ratio']:6.2f} x alone (worst {row['worst_ratio']:6.2f})   "
                f"flood {row['flood_per_s']:5.1f}/s"
            )
        results[title] = rows
    print(json.dumps(results))


if __name__ == "__main__":
    main()
