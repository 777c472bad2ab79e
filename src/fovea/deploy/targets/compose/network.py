"""Networks of the Compose stack, and the addresses in them.

NGINX reads addresses once, when it starts. So the servers behind it have fixed ones.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from fovea.core.errors import ConfigError

FRONT, ENGINES = ipaddress.IPv4Network("10.213.0.0/20"), ipaddress.IPv4Network("10.213.16.0/20")
PROXY = str(FRONT[4])
FIRST = 16
MOST = FRONT.num_addresses - FIRST - 1


def behind(number: int) -> str:
    """Return the fixed address of a server behind the proxy. Raises ConfigError if there are too many."""
    if number >= MOST:
        raise ConfigError(
            f"more than {MOST} servers do not fit into one Compose stack; accepted: fewer replicas",
            param="replicas",
        )
    return str(FRONT[FIRST + number])


def networks(*, monitoring: bool, redis: bool) -> dict[str, Any]:
    """Return all networks. Internal ones have no way out of the machine."""
    found: dict[str, Any] = {
        "public": {},
        "front": {"internal": True, "ipam": {"config": [{"subnet": str(FRONT)}]}},
        "engines": {"ipam": {"config": [{"subnet": str(ENGINES)}]}},
    }
    if redis:
        found["data"] = {"internal": True}
    if monitoring:
        found["monitoring"] = {}
    return found
