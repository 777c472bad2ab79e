"""The board of a cluster: addresses for peers, signals and decisions for `status`, keys for engines.

It lies in the key-value store of Ray's head node, so it needs no further actor. Entries have the time at
which they were written, because a replica that was killed cannot remove its own.
"""

from __future__ import annotations

import json
import time
from typing import Any

NAMESPACE = "fovea"
REPLICA, DECISION, SECRET, SPEC = "replica", "decision", "secret", "spec"
"""Kinds of entries. replica: of one replica. decision: of one deployment. secret: keys. spec: the environment
with which Ray Serve was started."""
KEYS = ("FOVEA_API_KEY", "FOVEA_ADMIN_KEY", "FOVEA_METRICS_KEY")
"""Variables with keys of `fovea serve`. `fovea cluster up` passes its own ones on to all engines."""
PEER_KEY = "FOVEA_PEER_KEY"
"""Variable with the secret that peers share. `fovea cluster up` makes one if it has none."""
FRESH_S = 15.0
"""Seconds after which an entry of a replica counts as that of a dead one."""


def put(kind: str, name: str, value: dict[str, Any]) -> None:
    """Write an entry, with the present time."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(f"{kind}/{name}", json.dumps({**value, "time": time.time()}), namespace=NAMESPACE)


def remove(kind: str, name: str = "") -> None:
    """Remove an entry; without a name all of this kind."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(f"{kind}/{name}", del_by_prefix=not name, namespace=NAMESPACE)


def get(kind: str, name: str) -> dict[str, Any] | None:
    """Return an entry; None: there is none."""
    from ray.experimental.internal_kv import _internal_kv_get

    value = _internal_kv_get(f"{kind}/{name}", namespace=NAMESPACE)
    return json.loads(value) if value else None


def entries(kind: str, start: str = "") -> dict[str, dict[str, Any]]:
    """Return the entries of a kind whose names begin with `start`, by name."""
    from ray.experimental.internal_kv import _internal_kv_list

    found = {}
    for key in _internal_kv_list(f"{kind}/{start}", namespace=NAMESPACE):
        name = key.decode().partition("/")[2]
        if (value := get(kind, name)) is not None:
            found[name] = value
    return found


def fresh(found: dict[str, dict[str, Any]], now: float) -> dict[str, dict[str, Any]]:
    """Return the entries of replicas that live. now: seconds since 1970."""
    return {name: value for name, value in found.items() if value["time"] > now - FRESH_S}
