"""The servers behind Envoy: their addresses, health checks and limits."""

from __future__ import annotations

import ipaddress
from typing import Any

from fovea.deploy.front import CONNECT_S, KEEP_ALIVE_S, Front
from fovea.deploy.targets.envoy.typed import address, seconds, typed

NAME = "fovea"
MOST_REQUESTS = 4096


def cluster(front: Front) -> dict[str, Any]:
    """Return the cluster of all servers."""
    endpoints = [{"endpoint": {"address": address(each.host, each.port)}} for each in front.servers]
    limits = {
        "max_connections": MOST_REQUESTS,
        "max_pending_requests": MOST_REQUESTS,
        "max_requests": MOST_REQUESTS,
        "max_retries": MOST_REQUESTS,
    }
    return {
        "name": NAME,
        "type": "STATIC" if all(_is_address(each.host) for each in front.servers) else "STRICT_DNS",
        "connect_timeout": seconds(CONNECT_S),
        "lb_policy": "LEAST_REQUEST",
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [
            {
                "timeout": "2s",
                "interval": "1s",
                "no_traffic_interval": "1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/ready"},
            }
        ],
        "circuit_breakers": {"thresholds": [{"priority": "DEFAULT", **limits}]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": typed(
                "upstreams.http.v3.HttpProtocolOptions",
                common_http_protocol_options={"idle_timeout": seconds(KEEP_ALIVE_S)},
                explicit_http_config={"http_protocol_options": {}},
            )
        },
        "load_assignment": {"cluster_name": NAME, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
