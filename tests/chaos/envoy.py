"""Envoy with its fault filter, as a second proxy that shares no code with ours."""

from __future__ import annotations

from typing import Any

from tests.chaos.client import send
from tests.support.servers import envoy_address

TYPES = "type.googleapis.com/envoy.extensions.filters"
ABORT_KEY, DELAY_KEY = "fault.http.abort.abort_percent", "fault.http.delay.fixed_delay_percent"
ABORT_STATUS, DELAY = 503, "1.5s"
PERCENT = 50


def config(port: int, admin_port: int, engine_port: int) -> dict[str, Any]:
    """Return Envoy's configuration. The percentages of its faults are 0 until `set_percent` changes them."""
    filters, denominator = "envoy.filters.http", {"numerator": 0, "denominator": "HUNDRED"}
    fault = {
        "name": f"{filters}.fault",
        "typed_config": {
            "@type": f"{TYPES}.http.fault.v3.HTTPFault",
            "abort": {"http_status": ABORT_STATUS, "percentage": denominator},
            "delay": {"fixed_delay": DELAY, "percentage": denominator},
        },
    }
    router = {"name": f"{filters}.router", "typed_config": {"@type": f"{TYPES}.http.router.v3.Router"}}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "0s"}}
    manager = {
        "@type": f"{TYPES}.network.http_connection_manager.v3.HttpConnectionManager", "stat_prefix": "http",
        "stream_idle_timeout": "0s", "use_remote_address": True, "http_filters": [fault, router],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }  # fmt: skip
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    endpoint = {"endpoint": {"address": envoy_address("127.0.0.1", engine_port)}}
    assignment = {"cluster_name": "engine", "endpoints": [{"lb_endpoints": [endpoint]}]}
    cluster = {"name": "engine", "type": "STATIC", "load_assignment": assignment}
    listener = {"name": "in", "address": envoy_address("127.0.0.1", port), "filter_chains": [chain]}
    return {
        "admin": {"address": envoy_address("127.0.0.1", admin_port)},
        "layered_runtime": {"layers": [{"name": "admin", "admin_layer": {}}]},
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    }


async def set_percent(admin_port: int, key: str, percent: int) -> bool:
    """Set the share of requests that get a fault. Returns whether Envoy accepted it."""
    outcome = await send(admin_port, "POST", f"/runtime_modify?{key}={percent}", {}, b"", 5.0)
    return outcome.status == 200


async def injected(admin_port: int) -> tuple[int, int]:
    """Return how many requests Envoy has aborted and delayed so far."""
    outcome = await send(admin_port, "GET", "/stats?filter=fault.(aborts|delays)_injected", {}, b"", 5.0)
    values = {}
    for line in outcome.body.decode(errors="replace").splitlines():
        name, _, value = line.rpartition(": ")
        values[name.rpartition(".")[2]] = int(value)
    return values.get("aborts_injected", 0), values.get("delays_injected", 0)
