"""A spec as values of Ray Serve: the plan of each engine, and the options of each deployment.

This module does not import ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fovea.cluster.ray.ingress import SIGNALS_S
from fovea.cluster.ray.placement import CPU, GPU, MEMORY, Bundle
from fovea.cluster.ray.spec import PEERS, ClusterSpec, Model, Role

POLICY = "fovea.cluster.ray.policy:ScalePolicy"
ROUTER = "fovea.cluster.ray.router:KeyRouter"
MOST_REQUESTS = 100_000
"""Requests that Ray Serve lets a replica have: the engine has limits of its own, and says so to clients."""
SURGE_PERCENT = 25
"""New replicas at a time in an update, rounded up, before old ones stop."""
STOP_MARGIN_S = 30.0
HEALTH_S = 5.0
LOOK_BACK_S = 10 * SIGNALS_S + 5
"""Seconds of reports that the controller keeps. The policy reads the latest."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The engine of a replica, as values that Ray can send.

    application, role: where it belongs.
    settings: of `fovea serve`.
    answers: whether it answers clients.
    drain_s: seconds that running answers have at its end.
    ranks: processes of the engine.
    peers: by the name of the setting for their addresses: their role, and the most replicas of it.
    peer_key: the secret that all peers share; "": there are no peers.
    keys: keys of clients and operators, by the name of their variable.
    target_s: target of first tokens, in seconds; 0: none.
    """

    application: str
    role: str
    settings: Mapping[str, Any]
    answers: bool
    drain_s: float
    ranks: int = 1
    peers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    peer_key: str = field(default="", repr=False)
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    target_s: float = 0.0


def plan(model: Model, role: Role, *, peer_key: str, keys: Mapping[str, str]) -> Plan:
    """Return the plan of a role's engines. peer_key: of the cluster. keys: see `Plan`."""
    own = model.engine_settings(role)
    settings: dict[str, Any] = {
        "served_model_name": model.name,
        "drain_seconds": model.drain_s,
        "lame_duck_s": 0.0,
    }
    if model.simulate:
        settings["simulate"] = True
    else:
        settings |= {"model": model.model, "device": "cuda" if role.gpus else "cpu"}
        if not role.gpus:
            settings |= {"threads": max(1, int(role.cpus)), "kv_cache_mib": 1024}
    if role.role == "encode":
        settings.pop("kv_cache_mib", None)
    settings |= own
    peers = {
        f"{peer}_peers": (peer, other.scale.replicas_max)
        for peer in PEERS.get(role.role, ())
        for other in model.roles
        if other.role == peer
    }
    target_ms = own.get("target_ttft_ms", 0)
    return Plan(
        model.name,
        role.role,
        settings,
        role.answers,
        model.drain_s,
        model.ranks(role),
        peers,
        peer_key if len(model.roles) > 1 else "",
        keys,
        target_ms / 1000 if isinstance(target_ms, int) else 0.0,
    )


def options(
    spec: ClusterSpec, model: Model, role: Role, wanted: list[Bundle], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options of a role's deployment.

    wanted: the bundles of a replica. environment: variables of its process.
    """
    first = wanted[0]
    known = {"num_cpus": first.get(CPU, 0), "num_gpus": first.get(GPU, 0), MEMORY: first.get(MEMORY, 0)}
    actor: dict[str, Any] = {
        **known,
        "resources": {name: value for name, value in first.items() if name not in (CPU, GPU, MEMORY)},
        "runtime_env": {"env_vars": dict(environment)},
    }
    found: dict[str, Any] = {
        "name": role.role,
        "ray_actor_options": actor,
        "max_ongoing_requests": MOST_REQUESTS,
        "graceful_shutdown_timeout_s": model.drain_s + spec.ingress.deregister_s + STOP_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 1.0,
        "health_check_period_s": HEALTH_S,
        "max_surge_percent": SURGE_PERCENT if model.surge else 0,
        **_replicas(role),
    }
    if len(wanted) > 1:
        found |= {"placement_group_bundles": wanted, "placement_group_strategy": "PACK"}
    if role.answers and not spec.ingress.haproxy:
        found["request_router_config"] = {
            "request_router_class": ROUTER,
            "request_router_kwargs": {"balance": spec.ingress.balance},
        }
    return found


def _replicas(role: Role) -> dict[str, Any]:
    scale = role.scale
    if scale.replicas_min == scale.replicas_max:
        return {"num_replicas": scale.replicas_min}
    return {
        "autoscaling_config": {
            "min_replicas": scale.replicas_min,
            "max_replicas": scale.replicas_max,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "look_back_period_s": LOOK_BACK_S,
            "policy": {"policy_function": POLICY, "policy_kwargs": asdict(scale)},
        }
    }
