"""Decides how many replicas are needed, from the engines' own signals. It starts nothing.

The caller passes the time. The same code scales a cluster (`cluster.ray`) and a simulated fleet
(`cluster.fleet`).

A busy GPU says little about waiting clients: an engine is busy with one request, too. So the signals are how
much work waits, how long the oldest request has waited, how many of the places of running requests are
taken, and which share of recent answers kept their targets. Work that waits says that there are too few
replicas; only the taken places say that fewer would be enough, because an engine full of running answers can
have an empty queue.

Replicas are added at once, in proportion to the work. A replica loads weights for minutes, and the queue
grows meanwhile: so no more are started than `growth` times those that answer. Replicas are removed a few at a
time, after the signals have been low for a while, because a cold replica has empty caches.
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
    places: requests that it can run at a time; 0: not known.
    """

    queued_s: float = 0.0
    oldest_s: float = 0.0
    in_flight: int = 0
    good: float | None = None
    places: float = 0.0

    @staticmethod
    def of_stats(stats: Mapping[str, float], work: Work = "all", good: float | None = None) -> Signals:
        """Read the signals for one kind of work from an engine's gauges. stats: as in `observe.table`."""
        queued = stats.get("queued_work_seconds", 0.0)
        encode = stats.get("queued_encode_seconds", 0.0)
        images = stats.get("oldest_waiting_image_seconds", 0.0)
        others = stats.get("oldest_waiting_ready_seconds", 0.0)
        waiting = stats.get("requests_waiting", 0.0)
        in_flight = int(waiting + stats.get("requests_running", 0.0))
        places = stats.get("sequences_allowed", 0.0)
        if work == "encode":
            return Signals(encode, images, int(stats.get("requests_waiting_image", 0.0)), good)
        if work == "answer":
            return Signals(max(0.0, queued - encode), others, in_flight, good, places)
        oldest = stats.get("oldest_waiting_seconds", max(images, others))
        return Signals(queued, oldest, in_flight, good, places)


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
        "Wanted share of answers within their targets. Below it, one replica is added, if replicas have more "
        "than one request in flight in the mean.",
        low=0,
        high=1,
    )
    target_places: float = setting(
        0.6,
        "Wanted requests in flight of a replica, as a share of those that it can run at the same time (its "
        "places). Above it, replicas are added. 0: off.",
        low=0,
        high=1,
    )
    target_in_flight: float = setting(
        0.0,
        "Wanted requests in flight per replica, for replicas that answer. Above it, replicas are added. "
        "0: off.",
        low=0,
        high=100_000,
    )
    growth: float = setting(
        2.0,
        "Most replicas, starting ones included, as a multiple of those that answer; one more is always "
        "allowed.",
        low=1,
        high=1000,
    )
    scale_up_s: float = setting(5.0, "Seconds between two additions.", low=0, high=3600)
    scale_down_s: float = setting(
        300.0,
        "Seconds for which fewer replicas must have been enough before some are removed, a tenth at most.",
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


class Need(NamedTuple):
    """The replicas that one signal asks for.

    replicas: for which the signal would be at its target.
    stay: replicas are removed only if those left would be below this share of the target.
    reason: the signal in words.
    """

    replicas: float
    stay: float
    reason: str


STAY_QUEUED = 0.5
"""`Need.stay` of the queue, which jumps with every prompt."""
STAY_RUNNING = 0.8
"""`Need.stay` of running requests, whose number is steady."""
REMOVED = 0.1
"""Largest share of the replicas that is removed at once; one always can be."""
SHARED = 1.0
"""Requests in flight per replica above which answers can be late because requests share a replica."""


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
        signals: of the replicas that answer; a replica that is starting, or is being removed, has none.
        replicas: running and starting ones together.
        """
        settings = self.settings
        wanted, reason = self._wanted(signals, replicas)
        bounded = min(max(wanted, settings.replicas_min), settings.replicas_max)
        if bounded != wanted:
            reason = f"{reason}; bounded by replicas_{'max' if bounded < wanted else 'min'}"
        if bounded >= replicas:
            self._low_since = None
        if bounded > replicas:
            if now - self._added_at < settings.scale_up_s and replicas >= settings.replicas_min:
                return Decision(replicas, f"{reason}; waits for the latest addition")
            self._added_at = now
            return Decision(bounded, reason)
        if bounded == replicas or replicas > settings.replicas_max:
            return Decision(bounded, reason)
        if self._low_since is None:
            self._low_since = now
        if now - self._low_since < settings.scale_down_s:
            return Decision(replicas, f"{reason}; not yet for {settings.scale_down_s:g} s")
        self._low_since = now
        return Decision(bounded, reason)

    def _wanted(self, signals: Sequence[Signals], replicas: int) -> tuple[int, str]:
        if not signals:
            return replicas, "no replica answers yet"
        needs = self._needs(signals)
        need = max(needs, key=lambda one: one.replicas)
        if need.replicas > replicas:
            most = max(replicas, len(signals) + 1, math.floor(self.settings.growth * len(signals)))
            return min(math.ceil(need.replicas - 1e-9), most), need.reason
        oldest = max(one.oldest_s for one in signals)
        in_flight = any(one.in_flight for one in signals)
        need = max(needs, key=lambda one: one.replicas / one.stay)
        fewest = max(math.ceil(need.replicas / need.stay - 1e-9), int(in_flight))
        if fewest >= replicas or oldest > STAY_QUEUED * self.settings.target_oldest_s:
            return replicas, need.reason
        removed = max(1, math.floor(REMOVED * replicas))
        return max(fewest, replicas - removed), f"{need.reason}: enough for fewer replicas"

    def _needs(self, signals: Sequence[Signals]) -> list[Need]:
        settings, answering = self.settings, len(signals)
        queued = sum(one.queued_s for one in signals)
        oldest = max(one.oldest_s for one in signals)
        in_flight = sum(one.in_flight for one in signals)
        places = sum(one.places for one in signals) / answering
        needs = [Need(queued / settings.target_queue_s, STAY_QUEUED, f"{queued:.2f} s of work wait")]
        if settings.target_in_flight:
            reason = f"{in_flight} requests are in flight"
            needs.append(Need(in_flight / settings.target_in_flight, STAY_RUNNING, reason))
        if settings.target_places and places:
            reason = f"{in_flight} of {places * answering:.0f} places are taken"
            needs.append(Need(in_flight / (settings.target_places * places), STAY_RUNNING, reason))
        # The next two do not measure the work: they ask for one more, and for another once that answers.
        if oldest > settings.target_oldest_s:
            needs.append(Need(answering + 1.0, 1.0, f"a request has waited {oldest:.1f} s"))
        known = [one.good for one in signals if one.good is not None]
        good = sum(known) / len(known) if known else 1.0
        if good < settings.target_goodput:
            apart = min(in_flight / SHARED, answering + 1.0)
            needs.append(Need(apart, 1.0, f"{good:.0%} of answers keep their targets"))
        return needs
