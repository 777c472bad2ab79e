"""Rows of the comparison: medians over rounds, differences to the direct way, and targets."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

DIRECT = "direct"
BUSY = 0.9
"""From this share of its core on, a proxy decides on the rate.

Below, something else does: the load generator, the backends, or other programs on the proxy's core."""


@dataclass(frozen=True)
class Slice:
    """One measurement of one proxy.

    proxy, kind: names.
    open_loop: whether requests came at a fixed rate; else each connection sent one after the other.
    turn: number of the round.
    requests: good answers.
    errors: failed requests by reason.
    seconds: duration.
    cpu_s: processor time of all processes of the proxy; 0 for the direct way.
    cpu_check_s: the same in ticks of /proc/PID/stat.
    p50_ms, p99_ms: latency of whole answers.
    """

    proxy: str
    kind: str
    open_loop: bool
    turn: int
    requests: int
    errors: Counter[str]
    seconds: float
    cpu_s: float
    cpu_check_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Row:
    """One proxy with one kind of request.

    cpu_ms: processor time per request in the closed loop, in milliseconds; median of the rounds.
    cpu_spread: lowest and highest round.
    cpu_open_ms: processor time per request at the fixed rate. It is higher, because each request wakes the
        proxy up, and finds the processor's caches cold; targets are for this figure.
    per_s: requests per second in the closed loop.
    busy: share of one core that the proxy used meanwhile.
    p50_ms, p99_ms: latency at the fixed rate.
    added_ms: median over the rounds of the p50 less the p50 of the direct way in the same round.
    errors: failed requests by reason.
    """

    proxy: str
    kind: str
    cpu_ms: float
    cpu_spread: tuple[float, float]
    cpu_open_ms: float
    per_s: float
    busy: float
    p50_ms: float
    p99_ms: float
    added_ms: float
    errors: dict[str, int]

    @property
    def is_limit(self) -> bool:
        """Whether the proxy, and not the load, decided on the rate."""
        return self.busy >= BUSY

    @property
    def per_core_s(self) -> float:
        """Requests per second that fit on one core, by the processor time of the closed loop."""
        return 1e3 / self.cpu_ms if self.cpu_ms else 0.0


@dataclass(frozen=True)
class Target:
    """The most, or the least, that Fovea's gateway may need.

    figure: name of a field or property of Row.
    """

    kind: str
    figure: str
    limit: float
    words: str
    at_least: bool = False

    def met(self, row: Row) -> bool:
        value = float(getattr(row, self.figure))
        return value >= self.limit if self.at_least else value <= self.limit


TARGETS = (
    Target("text", "cpu_open_ms", 0.5, "processor time per request of 1 KB: at most 0.5 ms"),
    Target("photo", "cpu_open_ms", 6.5, "processor time per request of 1.4 MB with an image: at most 6.5 ms"),
    Target("burst", "cpu_open_ms", 1.3, "processor time per stream of 100 events: at most 1.3 ms"),
    Target(
        "image", "per_core_s", 400.0, "requests/s of 220 KB that fit on a core: at least 400", at_least=True
    ),
    Target("text", "added_ms", 2.0, "added to the median latency of 1 KB: at most 2 ms"),
)


def rows(slices: Iterable[Slice]) -> list[Row]:
    """Summarize the slices, in the order in which proxies and kinds appear first."""
    groups: dict[tuple[str, str], list[Slice]] = defaultdict(list)
    direct: dict[tuple[str, int], float] = {}
    for entry in slices:
        groups[entry.proxy, entry.kind].append(entry)
        if entry.proxy == DIRECT and entry.open_loop:
            direct[entry.kind, entry.turn] = entry.p50_ms
    return [_row(proxy, kind, group, direct) for (proxy, kind), group in groups.items()]


def _row(proxy: str, kind: str, group: list[Slice], direct: dict[tuple[str, int], float]) -> Row:
    closed, at_rate = ([s for s in group if s.open_loop is is_open] for is_open in (False, True))
    times = [entry.cpu_s / entry.requests * 1e3 for entry in closed if entry.requests]
    added = [entry.p50_ms - direct[kind, entry.turn] for entry in at_rate if (kind, entry.turn) in direct]
    return Row(
        proxy=proxy,
        kind=kind,
        cpu_ms=_median(times),
        cpu_spread=(min(times, default=0.0), max(times, default=0.0)),
        cpu_open_ms=_median([entry.cpu_s / entry.requests * 1e3 for entry in at_rate if entry.requests]),
        per_s=_median([entry.requests / entry.seconds for entry in closed]),
        busy=_median([entry.cpu_s / entry.seconds for entry in closed]),
        p50_ms=_median([entry.p50_ms for entry in at_rate]),
        p99_ms=_median([entry.p99_ms for entry in at_rate]),
        added_ms=_median(added),
        errors=dict(sum((entry.errors for entry in group), Counter[str]())),
    )


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def clocks_differ_s(slices: Iterable[Slice]) -> float:
    """The largest difference between the two ways to measure processor time, in seconds."""
    return max((abs(entry.cpu_s - entry.cpu_check_s) for entry in slices), default=0.0)
