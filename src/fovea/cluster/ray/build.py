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

from fovea.cluster.ray.ingress import environment
from fovea.cluster.ray.placement import KV_MIB, Bundle
from fovea.cluster.ray.spec import PEERS, ClusterSpec, Model, Role
from fovea.deploy import ray_serve

ROUTER = "fovea.cluster.ray.router:KeyRouter"
PROXIES = {"head": "HeadOnly", "every-node": "EveryNode"}


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
            settings |= {"threads": max(1, int(role.cpus)), "kv_cache_mib": KV_MIB}
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
    variables = environment(spec)
    return {
        "proxy_location": PROXIES[spec.ingress.location],
        "http_options": {"host": spec.ingress.host, "port": spec.ingress.port},
        "applications": [
            ray_serve.application(
                model.name,
                spec.prefix(model),
                [asdict(plan(model, role)) for role in model.roles],
                [
                    _options(
                        spec,
                        model,
                        role,
                        resources[model.name, role.role],
                        surge=model.name in surging,
                    )
                    for role in model.roles
                ],
                variables,
            )
            for model in spec.models
        ],
    }


def _options(
    spec: ClusterSpec, model: Model, role: Role, wanted: list[Bundle], *, surge: bool
) -> dict[str, Any]:
    found = ray_serve.deployment(
        role.role, wanted, drain_s=model.drain_s, deregister_s=spec.ingress.deregister_s, surge=surge
    )
    found |= ray_serve.replicas(role.scale.replicas_min, role.scale.replicas_max, asdict(role.scale))
    if role.answers and not spec.ingress.haproxy:
        found["request_router_config"] = {
            "request_router_class": ROUTER,
            "request_router_kwargs": {"balance": spec.ingress.balance},
        }
    return found
