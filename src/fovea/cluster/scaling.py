"""Decides how many replicas are needed, from the engines' own signals. It knows no clock and starts nothing.

The same code scales a cluster (`cluster.ray`) and a simulated fleet (`cluster.fleet`).

A busy GPU says little about waiting clients: an engine is busy with one request, too. So the signals are
those of the queue: how much work waits, how long the oldest request has waited, and which share of recent
answers kept their targets. Replicas are added at once, in proportion to the work, and removed one at a time,
after the signals have been low for a while: a cold replica has no caches and loads weights for minutes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting

Work = Literal["all", "encode", "answer"]
"""The work that replicas do: everything, only images, or everything but images."""


@dataclass(frozen=True, slots=True)
class Signals:
    """The state of one replica.

    queued_s: estimated seconds of work of all requests that have no first token yet.
    oldest_s: seconds that the oldest waiting request has waited.
    in_flight: requests that it has accepted and not finished.
    good: share of recent answers within their targets; None: not known.
    """

    queued_s: float = 0.0
    oldest_s: float = 0.0
    in_flight: int = 0
    good: float | None = None

    @staticmethod
    def of_stats(stats: Mapping[str, float], work: Work = "all", good: float | None = None) -> Signals:
        """Read the signals for one kind of work from an engine's gauges. stats: as in `observe.table`."""
        queued = stats.get("queued_work_seconds", 0.0)
        encode = stats.get("queued_encode_seconds", 0.0)
        images = stats.get("oldest_waiting_image_seconds", 0.0)
        others = stats.get("oldest_waiting_ready_seconds", 0.0)
        waiting = stats.get("requests_waiting", 0.0)
        in_flight = int(waiting + stats.get("requests_running", 0.0))
        if work == "encode":
            return Signals(encode, images, int(stats.get("requests_waiting_image", 0.0)), good)
        if work == "answer":
            return Signals(max(0.0, queued - encode), others, in_flight, good)
        return Signals(queued, stats.get("oldest_waiting_seconds", max(images, others)), in_flight, good)


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    """When replicas are added and removed. Raises ConfigError for values that are not accepted."""

    replicas_min: int = setting(1, "Fewest replicas.", low=0, high=10_000)
    replicas_max: int = setting(1, "Most replicas.", low=1, high=10_000)
    target_queue_s: float = setting(
        1.0, "Seconds of work that may wait at each replica. More of it adds replicas.", low=0.001, high=3600
    )
    target_oldest_s: float = setting(
        2.0, "Seconds that a request may wait. A longer wait adds a replica.", low=0.001, high=3600
    )
    target_goodput: float = setting(
        0.95,
        "Share of answers that should keep their targets. A smaller one adds a replica while work waits.",
        low=0,
        high=1,
    )
    target_in_flight: float = setting(
        0.0,
        "Requests in flight for which a replica is wanted; for replicas whose work is answers, not images. "
        "0: requests in flight do not count.",
        low=0,
        high=100_000,
    )
    scale_up_s: float = setting(5.0, "Seconds between two additions.", low=0, high=3600)
    scale_down_s: float = setting(
        300.0,
        "Seconds for which fewer replicas must have been enough before one is removed.",
        low=0,
        high=86400,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.replicas_min > self.replicas_max:
            raise ConfigError(
                f"replicas_min is {self.replicas_min}, above replicas_max, which is {self.replicas_max}; "
                "accepted: at most replicas_max",
                param="replicas_min",
            )


class Decision(NamedTuple):
    """How many replicas are wanted, and why, in words for a log."""

    replicas: int
    reason: str


STAY = 0.5
"""Replicas are removed only if those left would have less than this share of every target."""


class Scaler:
    """Scales the replicas of one deployment.

    It remembers when it added a replica, and since when fewer would have been enough.
    """

    def __init__(self, settings: ScaleSettings) -> None:
        self.settings = settings
        self._added_at = -math.inf
        self._low_since: float | None = None

    def decide(self, now: float, signals: Sequence[Signals], replicas: int) -> Decision:
        """Return how many replicas are wanted.

        now: seconds on any clock that never goes back.
        signals: of the replicas that answer; a replica that is starting has none.
        replicas: running and starting ones together.
        """
        settings = self.settings
        wanted, reason = self._wanted(signals, replicas)
        bounded = min(max(wanted, settings.replicas_min), settings.replicas_max)
        if bounded != wanted:
            reason = f"{reason}; bounded by replicas_{'max' if bounded < wanted else 'min'}"
        if bounded > replicas:
            self._low_since = None
            if now - self._added_at < settings.scale_up_s and replicas >= settings.replicas_min:
                return Decision(replicas, f"{reason}; waits for the latest addition")
            self._added_at = now
            return Decision(bounded, reason)
        if bounded == replicas:
            self._low_since = None
            return Decision(replicas, reason)
        if replicas > settings.replicas_max:
            return Decision(settings.replicas_max, reason)
        if self._low_since is None:
            self._low_since = now
        if now - self._low_since < settings.scale_down_s:
            return Decision(replicas, f"{reason}; not yet for {settings.scale_down_s:g} s")
        self._low_since = now
        return Decision(replicas - 1, reason)

    def _wanted(self, signals: Sequence[Signals], replicas: int) -> tuple[int, str]:
        settings = self.settings
        if not signals:
            return replicas, "no replica answers yet"
        queued = sum(one.queued_s for one in signals)
        oldest = max(one.oldest_s for one in signals)
        in_flight = sum(one.in_flight for one in signals)
        needs = {f"{queued:.2f} s of work wait": queued / settings.target_queue_s}
        if settings.target_in_flight:
            needs[f"{in_flight} requests are in flight"] = in_flight / settings.target_in_flight
        if oldest > settings.target_oldest_s:
            needs[f"a request has waited {oldest:.1f} s"] = replicas + 1.0
        known = [one.good for one in signals if one.good is not None]
        if known and queued > 0 and sum(known) / len(known) < settings.target_goodput:
            needs[f"{sum(known) / len(known):.0%} of answers keep their targets"] = replicas + 1.0
        reason, need = max(needs.items(), key=lambda item: item[1])
        if need > replicas:
            return math.ceil(need - 1e-9), reason
        quiet = oldest <= STAY * settings.target_oldest_s
        if quiet and need <= STAY * (replicas - 1) and (replicas > 1 or not in_flight):
            return replicas - 1, f"{reason}: enough for fewer replicas"
        return replicas, reason
