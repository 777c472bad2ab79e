"""How a request finds its replica: by the key of its image, which it has in a header.

The gateway writes the header; other clients may. Without it, replicas take turns. HAProxy hashes the header
itself (`deploy.ray_serve`). Ray Serve's own proxy asks a router (`router.py`), which orders the replicas of a
key as the gateway does.

This module does not import ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fovea.cluster.ray.spec import ClusterSpec
from fovea.deploy import ray_serve
from fovea.gateway.backends.route import order


def environment(spec: ClusterSpec) -> dict[str, str]:
    """Return the environment of Ray Serve. The driver needs it, too, before it imports ray.serve."""
    ingress = spec.ingress
    return ray_serve.environment(
        haproxy=ingress.haproxy,
        balance=ingress.balance,
        retry_kib=ingress.retry_kib,
        deregister_s=ingress.deregister_s,
        drain_s=spec.drain_s,
    )


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
