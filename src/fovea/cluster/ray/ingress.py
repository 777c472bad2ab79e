"""How a request finds its replica: by the key of its image, which it has in a header.

The gateway writes the header; other clients may. Without it, replicas take turns.

HAProxy hashes the header onto a ring of replicas, with bounded loads: that is its own `balance hdr`, with
`hash-type consistent` and `hash-balance-factor`. Ray Serve writes HAProxy's file from a template, and takes
the algorithm and all times from environment variables of its controller and proxies.

Ray Serve's own proxy asks a router (`router.py`), which orders the replicas of a key as the gateway does.

This module does not import ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fovea.cluster.ray.spec import ClusterSpec, Ingress
from fovea.gateway.backends.route import order
from fovea.gateway.generate.outgoing import KEY_HEADER

HAPROXY_MARGIN_S = 60
"""Seconds for which HAProxy's old process outlives the longest answer that is waited for, after a reload."""
SIGNALS_S = 1.0
"""Seconds between two reports of a replica's signals to the controller."""


def environment(spec: ClusterSpec) -> dict[str, str]:
    """Return the environment of Ray Serve's controller, proxies and replicas.

    The driver needs it, too, before it imports ray.serve.
    """
    ingress = spec.ingress
    shared = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if ingress.haproxy else "0",
        "RAY_SERVE_SESSION_ID_HEADER_KEY": KEY_HEADER,
        # A relay's work is small, and it waits: a thread of its own would only add two hand-overs a message.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": f"{SIGNALS_S:g}",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": f"{ingress.deregister_s:g}",
    }
    return shared | (_haproxy(ingress, spec.drain_s) if ingress.haproxy else {})


def _haproxy(ingress: Ingress, drain_s: float) -> dict[str, str]:
    stop_s = math.ceil(drain_s + ingress.deregister_s) + HAPROXY_MARGIN_S
    factor = round(100 * ingress.balance)
    return {
        # The template writes this as `balance ...`; further lines follow it in the section `defaults`.
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "\n    ".join(
            (f"hdr({KEY_HEADER})", "hash-type consistent sdbm avalanche", f"hash-balance-factor {factor}")
        ),
        # After a reload, the old process cuts what still runs when this time is over.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(stop_s),
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_RETRIES": "3",
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(ingress.retry_kib * 1024),
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(stop_s),
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
    }


def ranked(key: str, loads: Mapping[str, int], balance: float) -> list[str]:
    """Return replicas in the order in which they should get a request, the first choice first.

    Those that would have more than `balance` times the average number of requests come last.

    key: of the image; "": none, so that the least busy replica is the first.
    loads: requests in flight by replica.
    """
    names: Sequence[str] = sorted(loads)
    if not key:
        return sorted(names, key=lambda name: (loads[name], name))
    names = order(key, [(name, 1.0) for name in names])
    most = balance * (sum(loads.values()) + 1) / len(loads) if loads else 0.0
    full = {name for name in names if loads[name] + 1 > math.ceil(most)}
    return [name for name in names if name not in full] + sorted(full, key=lambda name: (loads[name], name))
