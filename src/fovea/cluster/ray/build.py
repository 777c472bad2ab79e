"""A spec as a configuration of Ray Serve: applications, the plan of each engine, options of deployments.

It is what `serve deploy`, Ray Serve's REST API and KubeRay's `serveConfigV2` take. Ray Serve compares it with
what runs: replicas are replaced only if their plan changes, and not if their number does. It holds no
secrets, which replicas get from the board (`board.py`), or from their environment.

This module does not import ray.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fovea.cluster.ray.ingress import SIGNALS_S, environment
from fovea.cluster.ray.placement import CPU, GPU, MEMORY, Bundle
from fovea.cluster.ray.spec import PEERS, ClusterSpec, Model, Role

BUILDER = "fovea.cluster.ray.replica:build"
POLICY = "fovea.cluster.ray.policy:ScalePolicy"
ROUTER = "fovea.cluster.ray.router:KeyRouter"
PROXIES = {"head": "HeadOnly", "every-node": "EveryNode"}
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
    has_peers: whether engines of the model work for each other.
    target_s: target of first tokens, in seconds; 0: none.
    """

    application: str
    role: str
    settings: Mapping[str, Any]
    answers: bool
    drain_s: float
    ranks: int = 1
    peers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    has_peers: bool = False
    target_s: float = 0.0


def plan(model: Model, role: Role) -> Plan:
    """Return the plan of a role's engines."""
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
        len(model.roles) > 1,
        target_ms / 1000 if isinstance(target_ms, int) else 0.0,
    )


Resources = Mapping[tuple[str, str], list[Bundle]]
"""The bundles of a replica, by model and role."""


def configuration(spec: ClusterSpec, resources: Resources, surging: Collection[str]) -> dict[str, Any]:
    """Return the configuration of Ray Serve for a spec.

    surging: names of the models whose updates start new replicas before they stop old ones.
    """
    return {
        "proxy_location": PROXIES[spec.ingress.location],
        "http_options": {"host": spec.ingress.host, "port": spec.ingress.port},
        "applications": [
            {
                "name": model.name,
                "route_prefix": spec.prefix(model),
                "import_path": BUILDER,
                "args": {"plans": [asdict(plan(model, role)) for role in model.roles]},
                "runtime_env": {"env_vars": environment(spec)},
                "deployments": [
                    options(
                        spec,
                        model,
                        role,
                        resources[model.name, role.role],
                        surge=model.name in surging,
                    )
                    for role in model.roles
                ],
            }
            for model in spec.models
        ],
    }


def options(
    spec: ClusterSpec, model: Model, role: Role, wanted: list[Bundle], *, surge: bool
) -> dict[str, Any]:
    """Return the options of a role's deployment. wanted: the bundles of a replica."""
    first = wanted[0]
    known = {"num_cpus": first.get(CPU, 0), "num_gpus": first.get(GPU, 0), MEMORY: first.get(MEMORY, 0)}
    actor: dict[str, Any] = {
        **known,
        "resources": {name: value for name, value in first.items() if name not in (CPU, GPU, MEMORY)},
    }
    found: dict[str, Any] = {
        "name": role.role,
        "ray_actor_options": actor,
        "max_ongoing_requests": MOST_REQUESTS,
        "graceful_shutdown_timeout_s": model.drain_s + spec.ingress.deregister_s + STOP_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 1.0,
        "health_check_period_s": HEALTH_S,
        "max_surge_percent": SURGE_PERCENT if surge else 0,
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
