"""Planning and running of workloads, one after the other, with one result for each."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from fovea.bench.client import Client
from fovea.bench.context import WorkloadContext
from fovea.bench.measure import Bounds, Round, Sample, Spread, Summary, by_label, without_nan
from fovea.bench.settings import Shape, Traffic
from fovea.bench.sla import Verdict
from fovea.bench.workloads import SUITE, Lag, cold, measure_lag, play_chat, play_closed, play_open, play_trace
from fovea.core.trace import Trace

LATE_MS = 10.0
"""Delays of the load generator above this are reported in the notes: they are no longer small compared with a
token.
"""
BUSY_SHARE = 0.8
"""Share of one core from which the load generator itself may limit the load.

It sends from one thread, so it cannot use more than one core, and near that its requests wait for each other.
"""
Play = Callable[[WorkloadContext], Awaitable[Round]]
"""A function that runs one round of a workload."""


@dataclass(frozen=True, slots=True)
class PlannedWorkload:
    """A workload with the number of its rounds.

    name, title: identifier and description for people.
    requests: requests per round.
    play: runs one measured round.
    rounds: number of measured rounds.
    warm_up: runs one round before them that is not measured.
    warmups: number of such rounds.
    is_traffic: whether this is a traffic workload (open, closed, chat, trace), to which service-level targets
        apply.
    offered_rate: requests per second, where arrivals do not wait for answers; else None.
    """

    name: str
    title: str
    requests: int
    play: Play
    rounds: int
    warm_up: Play
    warmups: int
    is_traffic: bool = False
    offered_rate: float | None = None


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """The measurements of one workload.

    name, title, is_traffic, offered_rate: as in PlannedWorkload.
    rounds: the measured rounds, with all samples.
    summary: figures over all rounds.
    classes: the same figures per class of requests; empty if there is only one class.
    lag: delays of the load generator's own event loop.
    notes: sentences that a reader of the figures must know.
    verdicts: the service-level targets, each with whether it was met.
    core_share: share of one core that the load generator used while requests ran; nan if that was too short
        to measure.
    """

    name: str
    title: str
    is_traffic: bool
    rounds: Sequence[Round]
    summary: Summary
    classes: dict[str, Summary]
    lag: Spread
    notes: list[str]
    offered_rate: float | None = None
    verdicts: Sequence[Verdict] = ()
    core_share: float = math.nan

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values, without the single samples."""
        return {
            "name": self.name,
            "title": self.title,
            "offered_per_s": self.offered_rate,
            "summary": self.summary.as_dict(),
            "classes": {label: summary.as_dict() for label, summary in self.classes.items()},
            "lag": without_nan(asdict(self.lag)),
            "client_core_share": without_nan(self.core_share),
            "notes": self.notes,
            "verdicts": [without_nan(asdict(verdict)) for verdict in self.verdicts],
        }


class ProgressObserver(Protocol):
    """A listener that shows the progress of a run."""

    def begin(self, name: str, total: int) -> None:
        """A workload begins. total: number of its requests; 0: unknown."""
        ...

    def advance(self, sample: Sample) -> None:
        """One request of the workload has ended."""
        ...


def plan(names: Sequence[str], shape: Shape, traffic: Traffic, trace: Trace | None) -> list[PlannedWorkload]:
    """Plan the named workloads, in the order of their names. "open" becomes one workload per rate."""
    planned: list[PlannedWorkload] = []
    for name in names:
        if name in SUITE:
            work = SUITE[name]
            requests = work.requests or shape.concurrency
            planned.append(
                PlannedWorkload(name, work.title, requests, work.play, shape.repeats, work.play, shape.warmup)
            )
        else:
            planned += _plan_traffic(name, shape, traffic, trace)
    return planned


def _plan_traffic(name: str, shape: Shape, traffic: Traffic, trace: Trace | None) -> list[PlannedWorkload]:
    def planned(
        name: str, title: str, requests: int, play: Play, offered_rate: float | None = None
    ) -> PlannedWorkload:
        return PlannedWorkload(name, title, requests, play, 1, cold, shape.warmup, True, offered_rate)

    if name == "open":
        return [
            planned(
                f"open {rate:g}/s",
                f"{traffic.arrivals} arrivals, {rate:g} per second",
                traffic.requests,
                partial(play_open, traffic=traffic, rate=rate),
                rate,
            )
            for rate in traffic.rate
        ]
    if name == "closed":
        title = f"{traffic.clients} clients, each asking again when it has its answer"
        return [planned(name, title, traffic.requests, partial(play_closed, traffic=traffic))]
    if name == "chat":
        title = f"{traffic.clients} conversations at a time, of {traffic.turns} turns"
        count = -(-traffic.requests // traffic.turns) * traffic.turns
        return [planned(name, title, count, partial(play_chat, traffic=traffic))]
    assert trace is not None
    rate = len(trace) / trace[-1].at if trace[-1].at else None
    return [planned(name, "a trace, at its times", len(trace), partial(play_trace, trace=trace), rate)]


async def play(
    client: Client,
    workloads: Sequence[PlannedWorkload],
    shape: Shape,
    nonce: str,
    bounds: Bounds,
    observer: ProgressObserver,
) -> list[WorkloadResult]:
    """Run all workloads, one after the other.

    Each workload has texts and pictures of its own, so that none profits from what another left in a cache.
    """
    results = []
    for workload in workloads:
        context = WorkloadContext(client, shape, f"{nonce}-{workload.name}", observer.advance)
        if workload.warmups:
            observer.begin(f"{workload.name}: warming up", 0)
        for _ in range(workload.warmups):
            await workload.warm_up(context)
        observer.begin(workload.name, workload.rounds * workload.requests)
        async with measure_lag(client.clock, lambda: client.running > 0) as lag:
            rounds = [await workload.play(context) for _ in range(workload.rounds)]
        results.append(_result(workload, rounds, lag, bounds, client))
    return results


def _result(
    workload: PlannedWorkload, rounds: Sequence[Round], lag: Lag, bounds: Bounds, client: Client
) -> WorkloadResult:
    summary = Summary.of(rounds, bounds)
    by_class = by_label(rounds)
    classes = {label: Summary.of(part, bounds) for label, part in by_class.items()}
    delays = Spread.of(lag.delays)
    return WorkloadResult(
        name=workload.name,
        title=workload.title,
        is_traffic=workload.is_traffic,
        rounds=rounds,
        summary=summary,
        classes=classes if len(classes) > 1 else {},
        lag=delays,
        notes=notes_on(summary, delays, lag.core_share, usage=client.dialect.usage),
        offered_rate=workload.offered_rate,
        core_share=lag.core_share,
    )


def notes_on(summary: Summary, lag: Spread, core_share: float, *, usage: bool) -> list[str]:
    """Sentences that a reader of the figures must know.

    core_share: share of one core that the load generator used; nan if unknown.
    usage: whether the server was told to send usage.
    """
    notes = []
    if usage and not summary.counted:
        notes.append("the server sent no usage: tokens are counted by events")
    elif summary.tokens != summary.events:
        notes.append(
            f"usage says {summary.tokens} tokens, they came in {summary.events} events; "
            "gaps are between events, rates are of tokens"
        )
    if summary.short:
        notes.append(f"{summary.short} answers ended before the requested length")
    if summary.late.p95 > LATE_MS:
        notes.append(
            f"the load generator was late: requests left up to {summary.late.longest:.0f} ms after they were "
            f"due (p95 {summary.late.p95:.0f}); latencies include that, and the arrivals at the server "
            "differed from the plan"
        )
    if lag.p95 > LATE_MS:
        notes.append(
            f"the load generator's own loop was late by up to {lag.longest:.0f} ms (p95 {lag.p95:.0f}): "
            "times may be too long by as much"
        )
    if core_share > BUSY_SHARE:
        notes.append(
            f"the load generator itself was at its limit: it used {core_share:.0%} of one core while "
            "requests ran, and it cannot use more than one; the server may be faster than these figures"
        )
    return notes
