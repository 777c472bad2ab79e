"""A plan of workloads, played one after the other, and what came of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from fovea.bench.client import Client
from fovea.bench.context import Stage
from fovea.bench.drive import Lag, watching_lag
from fovea.bench.measure import Bounds, Round, Spread, Summary, by_label, plain
from fovea.bench.sample import Sample
from fovea.bench.settings import Shape, Traffic
from fovea.bench.sla import Verdict
from fovea.bench.suite import SUITE, cold
from fovea.bench.traffic import play_chat, play_closed, play_open, play_trace
from fovea.core.trace import Trace

LATE_MS = 10.0
"""From here on the load generator's own delays are told: they are no longer small beside a token."""


@dataclass(frozen=True, slots=True)
class Part:
    """offered: requests per second, where arrivals do not wait for answers. sends: requests of a round. play: one round; rounds: measured ones; warmups: before them, of `warm`."""

    name: str
    title: str
    sends: int
    play: Callable[[Stage], Awaitable[Round]]
    rounds: int
    warm: Callable[[Stage], Awaitable[Round]]
    warmups: int
    load: bool = False
    offered: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """offered: requests per second that arrived, where answers do not decide it. classes: the same figures per class of requests, where there is more than one. load: whether targets of a service
    apply to it. lag: of the load generator's own event loop.
    """

    name: str
    title: str
    load: bool
    rounds: Sequence[Round]
    summary: Summary
    classes: dict[str, Summary]
    lag: Spread
    notes: list[str]
    offered: float | None = None
    verdicts: Sequence[Verdict] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "offered_per_s": self.offered,
            "summary": self.summary.as_dict(),
            "classes": {label: summary.as_dict() for label, summary in self.classes.items()},
            "lag": plain(asdict(self.lag)),
            "notes": self.notes,
            "verdicts": [plain(asdict(verdict)) for verdict in self.verdicts],
        }


class Watch(Protocol):
    """Who looks on."""

    def begin(self, name: str, total: int) -> None: ...

    def seen(self, sample: Sample) -> None: ...


def plan(names: Sequence[str], shape: Shape, traffic: Traffic, trace: Trace | None) -> list[Part]:
    """The parts in the order of their names; a part per rate for "open"."""
    parts: list[Part] = []
    for name in names:
        if name in SUITE:
            work = SUITE[name]
            sends = work.sends or shape.concurrency
            parts.append(Part(name, work.title, sends, work.play, shape.repeats, work.play, shape.warmup))
        else:
            parts += _loads(name, shape, traffic, trace)
    return parts


def _loads(name: str, shape: Shape, traffic: Traffic, trace: Trace | None) -> list[Part]:
    def part(
        name: str,
        title: str,
        sends: int,
        play: Callable[[Stage], Awaitable[Round]],
        offered: float | None = None,
    ) -> Part:
        return Part(name, title, sends, play, 1, cold, shape.warmup, True, offered)

    if name == "open":
        return [
            part(
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
        return [part(name, title, traffic.requests, partial(play_closed, traffic=traffic))]
    if name == "chat":
        title = f"{traffic.clients} conversations at a time, of {traffic.turns} turns"
        count = -(-traffic.requests // traffic.turns) * traffic.turns
        return [part(name, title, count, partial(play_chat, traffic=traffic))]
    assert trace is not None
    rate = len(trace) / trace[-1].at if trace[-1].at else None
    return [part(name, "a trace, at its times", len(trace), partial(play_trace, trace=trace), rate)]


async def play(
    client: Client, parts: Sequence[Part], shape: Shape, nonce: str, bounds: Bounds, watch: Watch
) -> list[Result]:
    """Every part has texts and pictures of its own, so that none finds what another left in a cache."""
    results = []
    for part in parts:
        stage = Stage(client, shape, f"{nonce}-{part.name}", watch.seen)
        if part.warmups:
            watch.begin(f"{part.name}: warming up", 0)
        for _ in range(part.warmups):
            await part.warm(stage)
        watch.begin(part.name, part.rounds * part.sends)
        async with watching_lag(client.clock, lambda: client.running > 0) as lag:
            rounds = [await part.play(stage) for _ in range(part.rounds)]
        results.append(_result(part, rounds, lag, bounds, client))
    return results


def _result(part: Part, rounds: Sequence[Round], lag: Lag, bounds: Bounds, client: Client) -> Result:
    summary = Summary.of(rounds, bounds)
    labelled = by_label(rounds)
    classes = {label: Summary.of(of, bounds) for label, of in labelled.items()} if len(labelled) > 1 else {}
    lags = Spread.of(lag.seen)
    notes = notes_on(summary, lags, usage=client.dialect.usage)
    return Result(part.name, part.title, part.load, rounds, summary, classes, lags, notes, part.offered)


def notes_on(summary: Summary, lag: Spread, *, usage: bool) -> list[str]:
    """What a reader of the figures must know of them."""
    notes = []
    if usage and not summary.counted:
        notes.append("the server sent no usage: tokens are counted by events")
    elif summary.tokens != summary.events:
        notes.append(
            f"usage says {summary.tokens} tokens, they came in {summary.events} events; gaps are between events, "
            "rates are of tokens"
        )
    if summary.short:
        notes.append(f"{summary.short} answers ended before the length that was asked for")
    if summary.late.p95 > LATE_MS:
        notes.append(
            f"the load generator was late: requests left up to {summary.late.longest:.0f} ms after they were due "
            f"(p95 {summary.late.p95:.0f}); latencies hold that, and the server met other arrivals than planned"
        )
    if lag.p95 > LATE_MS:
        notes.append(
            f"the load generator's own loop was late by up to {lag.longest:.0f} ms (p95 {lag.p95:.0f}): times may be "
            "that much too long"
        )
    return notes
