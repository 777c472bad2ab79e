"""The state of a cluster as values: models, roles, replicas, nodes, signals, decisions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fovea.cluster.ray import board
from fovea.cluster.ray.signals import UNKNOWN


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica.

    name: its name, as in the header x-fovea-replica.
    state: of Ray Serve, such as RUNNING, STARTING, STOPPING.
    node: address of its node. pid: of the engine; 0: not known.
    queued_s, oldest_s, in_flight, good: its signals (`cluster.scaling.Signals`); none: not known.
    """

    name: str
    state: str
    node: str
    pid: int
    queued_s: float | None = None
    oldest_s: float | None = None
    in_flight: int | None = None
    good: float | None = None


@dataclass(frozen=True, slots=True)
class RoleState:
    """One role of a model: a deployment.

    state: of Ray Serve, such as HEALTHY, UPDATING. message: what is wrong; "": nothing.
    target: replicas that are wanted. reason: of the last decision on it; change: of the last that changed it.
    """

    role: str
    state: str
    message: str
    target: int
    reason: str
    change: str
    replicas: tuple[ReplicaState, ...]


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model: an application of Ray Serve."""

    name: str
    state: str
    prefix: str
    roles: tuple[RoleState, ...]


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster. nodes: those that live, by address, with how many replicas each has."""

    models: tuple[ModelState, ...]
    nodes: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        return asdict(self)


def read_status() -> ClusterState:
    """Ask Ray Serve and the board. The caller has connected."""
    import ray
    from ray.serve.context import _get_global_client
    from ray.serve.exceptions import RayServeException

    nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    try:
        details = _get_global_client().get_serve_details()
    except RayServeException:
        return ClusterState((), dict.fromkeys(nodes, 0))
    entries = board.fresh(board.entries(board.REPLICA), time.time())
    return state_of(details, entries, board.entries(board.DECISION), nodes)


def state_of(
    details: Mapping[str, Any],
    entries: Mapping[str, Mapping[str, Any]],
    decisions: Mapping[str, Mapping[str, Any]],
    nodes: list[str],
) -> ClusterState:
    """Return the state of a cluster.

    details: of Ray Serve, as its REST API has them. entries, decisions: of the board, by name.
    nodes: addresses of the nodes that live; of several nodes on one machine, several times the same.
    """
    models = []
    counts = dict.fromkeys(nodes, 0)
    for name, application in sorted(details["applications"].items()):
        roles = []
        for role, deployment in sorted(application["deployments"].items()):
            replicas = tuple(
                _replica(one, entries.get(f"{name}/{role}/{one['replica_id']}", {}))
                for one in deployment["replicas"]
            )
            for one in replicas:
                counts[one.node] = counts.get(one.node, 0) + 1
            latest = decisions.get(f"{name}/{role}/latest", {})
            change = decisions.get(f"{name}/{role}/change", {})
            roles.append(
                RoleState(
                    role,
                    _word(deployment["status"]),
                    str(deployment["message"]),
                    int(deployment["target_num_replicas"]),
                    str(latest.get("reason", "a fixed number")),
                    f"{change['before']} -> {change['replicas']}: {change['reason']}" if change else "",
                    replicas,
                )
            )
        prefix = str(application.get("route_prefix") or "")
        models.append(ModelState(name, _word(application["status"]), prefix, tuple(roles)))
    return ClusterState(tuple(models), counts)


def _replica(one: Mapping[str, Any], entry: Mapping[str, Any]) -> ReplicaState:
    signals = entry.get("signals", {})
    good = signals.get("good", UNKNOWN)
    return ReplicaState(
        str(one["replica_id"]),
        _word(one["state"]),
        str(one.get("node_ip") or ""),
        int(entry.get("pid", 0)),
        signals.get("queued_s"),
        signals.get("oldest_s"),
        int(signals["in_flight"]) if "in_flight" in signals else None,
        None if good < 0 else good,
    )


def _word(state: Any) -> str:
    """Return a state of Ray Serve, a member of one of its enumerations, as its word."""
    return str(getattr(state, "value", state))
