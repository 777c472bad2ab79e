"""The signals of a replica, from its engine's /metrics. It knows no Ray, no clock and no connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from fovea.cluster.scaling import Signals, Work

PREFIX = "fovea:"
BUCKETS = "fovea:ttft_seconds_bucket{"
WINDOW_S = 60.0
"""Seconds over which the share of answers within their target is counted."""
UNKNOWN = -1.0
"""Share of good answers in a report to Ray, whose values are numbers, if it is not known."""


def work_of(role: str) -> Work:
    """Return the work of a role, as scaling knows it."""
    return "encode" if role == "encode" else "all" if role == "all" else "answer"


def gauges(text: str) -> dict[str, float]:
    """Return Fovea's metrics without labels, by name without prefix. text: in Prometheus's format."""
    found = {}
    for line in text.splitlines():
        if line.startswith(PREFIX):
            name, _, value = line.partition(" ")
            if "{" not in name:
                found[name.removeprefix(PREFIX)] = float(value.split()[0])
    return found


def first_tokens(text: str) -> dict[float, float]:
    """Return how many first tokens came within each bound, in seconds, since the start."""
    found: dict[float, float] = {}
    for line in text.splitlines():
        if line.startswith(BUCKETS):
            labels, _, value = line.rpartition("} ")
            bound = labels.partition('le="')[2].partition('"')[0]
            found[float(bound)] = found.get(float(bound), 0.0) + float(value)
    return found


class Goodput:
    """The share of recent first tokens that came within a target.

    The target counts as the smallest bound of the histogram that is not below it.
    """

    def __init__(self, target_s: float) -> None:
        """target_s: seconds; 0: there is no target."""
        self._target_s = target_s
        self._seen: deque[tuple[float, float, float]] = deque()

    def share(self, now: float, counts: Mapping[float, float]) -> float | None:
        """Take the present counts, and return the share; None: there is no target, or were no answers."""
        if not self._target_s or not counts:
            return None
        bound = min(one for one in counts if one >= self._target_s)
        self._seen.append((now, counts[bound], max(counts.values())))
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        _, good, total = (end - start for end, start in zip(self._seen[-1], self._seen[0], strict=True))
        return good / total if total > 0 else None


def report(signals: Signals) -> dict[str, float]:
    """Return signals as numbers by name."""
    good = UNKNOWN if signals.good is None else signals.good
    return {
        "queued_s": signals.queued_s,
        "oldest_s": signals.oldest_s,
        "in_flight": float(signals.in_flight),
        "good": good,
        "places": signals.places,
    }


def from_report(values: Mapping[str, float]) -> Signals:
    """Return the signals of `report`."""
    good = values.get("good", UNKNOWN)
    return Signals(
        values.get("queued_s", 0.0),
        values.get("oldest_s", 0.0),
        int(values.get("in_flight", 0.0)),
        None if good < 0 else good,
        values.get("places", 0.0),
    )
