"""Values of Ray Serve that `fovea cluster` and the target `rayservice` share. It knows no Ray.

HAProxy hashes the header with the routing key onto a ring of replicas, with bounded loads: that is its own
`balance hdr`, with `hash-type consistent` and `hash-balance-factor`. Ray Serve writes HAProxy's file from a
template, and takes the algorithm and all times from environment variables of its controller and proxies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fovea.core.names import KEY_HEADER

BUILDER = "fovea.cluster.ray.replica:build"
"""The function that makes an application from its arguments, on a node of the cluster."""
POLICY = "fovea.cluster.ray.policy:ScalePolicy"
CPU, GPU, MEMORY = "CPU", "GPU", "memory"
"""Resources of Ray; memory is in bytes."""
HAPROXY_MARGIN_S = 60
"""Seconds for which HAProxy's old process outlives the longest answer that is waited for, after a reload."""
SIGNALS_S = 1.0
"""Seconds between two reports of a replica's signals to the controller."""
LOOK_BACK_S = 15.0
"""Seconds of reports that the controller keeps. The policy reads the latest."""
MOST_REQUESTS = 100_000
"""Requests that Ray Serve lets a replica have: the engine has limits of its own, and says so to clients."""
SURGE_PERCENT = 25
"""New replicas at a time in an update, rounded up, before old ones stop."""
STOP_MARGIN_S = 30.0
HEALTH_S = 5.0


def environment(
    *, haproxy: bool, balance: float, retry_kib: int, deregister_s: float, drain_s: float
) -> dict[str, str]:
    """Return the environment of Ray Serve's controller, proxies and replicas.

    haproxy: whether HAProxy is the ingress.
    balance: most requests of a replica, as a multiple of the average.
    retry_kib: largest request that is sent again after its replica was lost.
    deregister_s: seconds for which a stopped replica accepts requests.
    drain_s: seconds of the longest answer.
    """
    shared = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if haproxy else "0",
        "RAY_SERVE_SESSION_ID_HEADER_KEY": KEY_HEADER,
        # A relay's work is small, and it waits: a thread of its own would only add two hand-overs a message.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": f"{SIGNALS_S:g}",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": f"{deregister_s:g}",
    }
    if not haproxy:
        return shared
    stop_s = math.ceil(drain_s + deregister_s) + HAPROXY_MARGIN_S
    ring = (
        f"hdr({KEY_HEADER})",
        "hash-type consistent sdbm avalanche",
        f"hash-balance-factor {round(100 * balance)}",
    )
    return shared | {
        # The template writes this as `balance ...`; further lines follow it in the section `defaults`.
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "\n    ".join(ring),
        # After a reload, the old process cuts what still runs when this time is over.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(stop_s),
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(stop_s),
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_RETRIES": "3",
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(retry_kib * 1024),
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
    }


def application(
    name: str,
    prefix: str,
    plans: Sequence[Mapping[str, Any]],
    deployments: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """Return one application of Ray Serve's configuration.

    plans: of its engines, see `cluster.ray.build.Plan`. deployments: their options. variables: environment;
    empty: the nodes have it.
    """
    return {
        "name": name,
        "route_prefix": prefix,
        "import_path": BUILDER,
        "args": {"plans": list(plans)},
        **({"runtime_env": {"env_vars": dict(variables)}} if variables else {}),
        "deployments": list(deployments),
    }


def deployment(
    role: str, bundles: Sequence[Mapping[str, float]], *, drain_s: float, deregister_s: float, surge: bool
) -> dict[str, Any]:
    """Return the options of the deployment of a role, without those of its number of replicas.

    bundles: resources of a replica, for each rank. surge: whether updates start new replicas first.
    """
    first = bundles[0]
    actor: dict[str, Any] = {
        "num_cpus": first.get(CPU, 0),
        "num_gpus": first.get(GPU, 0),
        "memory": first.get(MEMORY, 0),
        "resources": {name: value for name, value in first.items() if name not in (CPU, GPU, MEMORY)},
    }
    found: dict[str, Any] = {
        "name": role,
        "ray_actor_options": {name: value for name, value in actor.items() if value or name == "num_cpus"},
        "max_ongoing_requests": MOST_REQUESTS,
        "graceful_shutdown_timeout_s": drain_s + deregister_s + STOP_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 1.0,
        "health_check_period_s": HEALTH_S,
        "max_surge_percent": SURGE_PERCENT if surge else 0,
    }
    if len(bundles) > 1:
        found |= {
            "placement_group_bundles": [dict(one) for one in bundles],
            "placement_group_strategy": "PACK",
        }
    return found


def replicas(fewest: int, most: int, scale: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a deployment's number of replicas. scale: settings of `cluster.scaling`."""
    if fewest == most:
        return {"num_replicas": fewest}
    return {
        "autoscaling_config": {
            "min_replicas": fewest,
            "max_replicas": most,
            "upscale_delay_s": 0.0,  # the policy has delays of its own
            "downscale_delay_s": 0.0,
            "look_back_period_s": LOOK_BACK_S,
            "policy": {"policy_function": POLICY, "policy_kwargs": dict(scale)},
        }
    }
