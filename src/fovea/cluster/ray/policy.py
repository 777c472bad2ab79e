"""Scaling by the engines' own signals: the one policy of `cluster.scaling`, as Ray Serve calls it.

Ray Serve's controller calls it several times a second with the latest reports of all replicas. This module
does not import ray; Ray Serve copies it to its controller as it is, so what it imports must be installed
there, as everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fovea.cluster.ray import board
from fovea.cluster.ray.signals import from_report, report
from fovea.cluster.scaling import Scaler, ScaleSettings, Signals

log = logging.getLogger("fovea.cluster")
PUBLISH_S = 2.0
"""Seconds after which an unchanged decision is published again."""


class Context(Protocol):
    """The part of Ray Serve's AutoscalingContext that is used."""

    app_name: str
    deployment_name: str
    target_num_replicas: int
    current_time: float
    running_replicas: Any
    raw_metrics: Mapping[str, Mapping[Any, Any]]


def latest_signals(context: Context) -> list[Signals]:
    """Return the latest signals of the replicas that run and have reported."""
    metrics = context.raw_metrics or {}
    found = []
    for replica in context.running_replicas:
        values = {
            name: series[replica][-1].value
            for name, series in metrics.items()
            if name in REPORTED and len(series.get(replica) or ())
        }
        if values:
            found.append(from_report(values))
    return found


REPORTED = frozenset(report(Signals()))


class ScalePolicy:
    """Decides the number of replicas of one deployment."""

    def __init__(
        self, publish: Callable[[str, str, dict[str, Any]], None] = board.put, **settings: Any
    ) -> None:
        """settings: those of ScaleSettings. publish: see `board.put`."""
        self._scaler = Scaler(ScaleSettings(**settings))
        self._publish = publish
        self._said_at = 0.0

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and nothing to remember."""
        now, signals = context.current_time, latest_signals(context)
        decision = self._scaler.decide(now, signals, context.target_num_replicas)
        changed = decision.replicas != context.target_num_replicas
        if changed or now - self._said_at >= PUBLISH_S:
            self._said_at = now
            value: dict[str, Any] = {
                "replicas": decision.replicas,
                "before": context.target_num_replicas,
                "reason": decision.reason,
            }
            name = f"{context.app_name}/{context.deployment_name}"
            self._say(f"{name}/latest", value)
            if changed:
                log.info("%s: %d replicas, because %s", name, decision.replicas, decision.reason)
                self._say(f"{name}/change", value)
        return decision.replicas, {}

    def _say(self, name: str, value: dict[str, Any]) -> None:
        try:
            self._publish(board.DECISION, name, value)
        except Exception:
            log.warning("a decision cannot be published now", exc_info=True)
