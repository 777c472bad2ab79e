"""Checks under load: warm-up, saturation, and 10, 50 and 100% of it."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Sequence

from fovea.doctor.check import Check, Need, Verdict, failed, not_applicable, passed, warned
from fovea.doctor.load import LoadFigures
from fovea.doctor.pictures import data_url, png
from fovea.doctor.subject import Subject

COLD = 5.0
"""A first request that takes this many times as long as later ones found the server not warmed up."""
SLOWER = 4.0
"""The median answer at half of the saturation may take this many times as long as at a tenth of it.

Medians are compared, and not rates, because the number of random arrivals in a short run says little.
"""


def warm_up(subject: Subject) -> Verdict:
    """Are the first requests of a new size as fast as later ones?"""
    server, times = subject.server, []
    for _ in range(4):
        red, green, blue = secrets.token_bytes(3)
        begun = subject.clock()
        images = [data_url(png(336, 336, (red, green, blue)))] if server.takes_images else []
        answer = server.ask(f"What is this? {red}", images)
        times.append(subject.clock() - begun)
        if answer.status != 200:
            return failed(f"status {answer.status}", answer.message, "read the server's log")
    later = statistics.median(times[1:])
    figure = f"first {times[0] * 1e3:.0f} ms, later ones {later * 1e3:.0f} ms (median of 3)"
    if times[0] > COLD * later:
        return warned(
            figure,
            "the server compiles or loads something at the first request",
            "send a request with an image before it gets traffic, as a start-up probe",
        )
    return passed(figure)


def saturation(subject: Subject) -> Verdict:
    """How many requests per second does the server answer at most, and from how many clients on?"""
    found = subject.load.saturation(subject.server)
    if not found.best:
        return failed("no answer at all", _errors(found.steps[-1][1]), "read the server's log")
    clients, knee = found.steps[found.knee]
    figure = f"knee at {clients} clients: {knee.per_second:.1f} of at most {found.best:.1f} requests/s"
    broken = [(number, each) for number, each in found.steps if each.failed > each.refused]
    if broken:
        number, each = broken[0]
        return failed(
            figure, f"with {number} clients {each.failed} of {each.requests} fail: {_errors(each)}",
            "read the server's log",
        )  # fmt: skip
    if not found.found:
        return warned(
            figure,
            f"the throughput still grows with {found.steps[-1][0]} clients",
            f"--max-clients {2 * found.steps[-1][0]}",
        )
    return passed(figure, _why(found.steps, found.knee))


def ramp(subject: Subject) -> Verdict:
    """Does the server keep its latencies at 10, 50 and 100% of its saturation?"""
    levels = subject.load.levels(subject.server)
    if not levels:
        return not_applicable("there was no answer in the search for the saturation")
    figure = "; ".join(_level(share, figures) for share, figures in levels)
    for share, figures in levels:
        if figures.failed > figures.refused or (figures.failed and share < 1.0):
            return failed(
                figure,
                f"at {share:.0%} {figures.failed} of {figures.requests} fail: {_errors(figures)}",
                "read the server's log",
            )
    half = levels[1][1]
    if half.missed:
        return failed(
            figure, f"at 50% these targets are missed: {', '.join(half.missed)}", "docs/scheduling.md"
        )
    growth = half.end_to_end[0] / levels[0][1].end_to_end[0]
    if growth > SLOWER:
        return warned(
            figure,
            f"the median answer at 50% takes {growth:.1f} times as long as at 10%",
            "--load-seconds 30 for a longer run; then docs/scheduling.md",
        )
    last = levels[-1][1]
    if last.refused:
        return warned(
            figure, f"at 100% {last.refused} requests are refused", "--max-queue, or a second server"
        )
    note = "" if subject.load.judged else "no targets were given: --sla FILE"
    return passed(figure, note)


def bottleneck(subject: Subject) -> Verdict:
    """In which stage do requests spend their time?"""
    if not subject.server.is_fovea:
        return not_applicable("only Fovea tells the stages of requests")
    subject.load.levels(subject.server)
    stages = {name: seconds for name, seconds in subject.server.stages().items() if seconds > 0}
    total = sum(stages.values())
    if not total:
        return not_applicable("no request was measured")
    first, *rest = sorted(stages, key=lambda name: -stages[name])
    figure = ", ".join(f"{name} {stages[name] / total:.0%}" for name in (first, *rest[:2]))
    if first == "queue":
        return warned(
            figure,
            "requests wait longer than they are computed",
            "a second server behind `fovea gateway`, or fewer visual tokens: docs/visual-tokens.md",
        )
    return passed(figure, "`fovea profile` divides it further")


def _why(steps: Sequence[tuple[int, LoadFigures]], knee: int) -> str:
    if knee + 1 >= len(steps):
        return ""
    (clients, here), (more, there) = steps[knee], steps[knee + 1]
    gain = there.per_second / here.per_second - 1
    return (
        f"{more} clients in place of {clients} change the throughput by {gain:+.0%}, "
        f"and the P95 of the first token from {here.ttft[1]:.0f} to {there.ttft[1]:.0f} ms"
    )


def _level(share: float, figures: LoadFigures) -> str:
    times = "/".join(f"{value:.0f}" for value in figures.end_to_end)
    return f"{share:.0%}: P50/P95/P99 {times} ms, {figures.error_rate:.1%} errors of {figures.requests}"


def _errors(figures: LoadFigures) -> str:
    return ", ".join(f"{count} times {kind}" for kind, count in figures.errors.items())


CHECKS = (
    Check("load", "warm-up", "first requests", warm_up),
    Check("load", "saturation", "saturation", saturation, (Need.LOAD,)),
    Check("load", "ramp", "10, 50 and 100% of the saturation", ramp, (Need.LOAD,)),
    Check("load", "bottleneck", "stage that takes the time", bottleneck, (Need.LOAD,)),
)
