"""Envoy in front of gateways or engines, with active health checks on /ready.

Bodies of more than 1 MiB pass through. Envoy keeps a copy of each, of at most `max_body_mib`, until the
answer begins, so that it can send the request to another server.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

import yaml

from fovea.deploy.front import (
    CERTIFICATE,
    CONNECT_S,
    EXACT,
    HEADER_KIB,
    HEADER_S,
    HEADERS,
    KEEP_ALIVE_S,
    PREFIXES,
    PRIVATE_KEY,
    Front,
    front_of,
)
from fovea.deploy.machine import LOOPBACK, behind_proxy, service_ports
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files


def typed(name: str, **values: Any) -> dict[str, Any]:
    """Return the configuration of an extension.

    name: its type, without the package of all extensions.
    """
    return {"@type": f"type.googleapis.com/envoy.extensions.{name}", **values}


def address(host: str, port: int) -> dict[str, Any]:
    """Return an address in Envoy's form."""
    return {"socket_address": {"address": host, "port_value": port}}


def seconds(value: float) -> str:
    """Return a duration in Envoy's form."""
    return f"{value:g}s"


CLUSTER = "fovea"
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
        "name": CLUSTER,
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
        "load_assignment": {"cluster_name": CLUSTER, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


MIB = 1024 * 1024
LARGEST = 2**63 - 1
JSON = "application/json"
BUFFER = "envoy.filters.http.buffer"
PUBLIC = {
    "safe_regex": {
        "regex": "|".join([*map(re.escape, EXACT), *(f"{re.escape(prefix)}.*" for prefix in PREFIXES)])
    }
}
BROKEN_FLAGS = ("UC", "UR", "UPE")
"""Envoy's flags of a server that ended its connection, or broke HTTP, before it answered."""


def listener(front: Front) -> dict[str, Any]:
    """Return the listener for clients."""
    chain: dict[str, Any] = {
        "filters": [
            {"name": "envoy.filters.network.http_connection_manager", "typed_config": _manager(front)}
        ]
    }
    if front.tls:
        certificate = {
            "certificate_chain": {"filename": CERTIFICATE},
            "private_key": {"filename": PRIVATE_KEY},
        }
        common = {
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
            "tls_certificates": [certificate],
            "alpn_protocols": ["http/1.1"],
        }
        chain["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": typed("transport_sockets.tls.v3.DownstreamTlsContext", common_tls_context=common),
        }
    return {
        "name": "clients",
        "address": address(front.address or "0.0.0.0", front.port),
        "per_connection_buffer_limit_bytes": MIB,
        "filter_chains": [chain],
    }


def _manager(front: Front) -> dict[str, Any]:
    """Return the connection manager.

    Bodies of up to 1 MiB are taken in first: a server that refuses a request may answer before it has arrived
    completely, and then Envoy could not send it again. Larger bodies, and all answers, pass through.
    """
    buffer = {
        "name": BUFFER,
        "disabled": True,  # the route of small bodies switches it on
        "typed_config": typed("filters.http.buffer.v3.Buffer", max_request_bytes=MIB),
    }
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": typed("filters.http.router.v3.Router"),
    }
    host = {
        "name": CLUSTER,
        "domains": ["*"],
        "request_body_buffer_limit": front.body_mib * MIB,
        "routes": _routes(front),
    }
    return typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="clients",
        codec_type="HTTP1",
        use_remote_address=True,
        server_header_transformation="PASS_THROUGH",
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action="REJECT_REQUEST",
        max_request_headers_kb=HEADER_KIB,
        request_headers_timeout=seconds(HEADER_S),
        stream_idle_timeout=seconds(front.read_s),
        common_http_protocol_options={"idle_timeout": "75s", "max_headers_count": HEADERS},
        upgrade_configs=[{"upgrade_type": "websocket"}],
        local_reply_config=_own_errors(front),
        route_config={"name": CLUSTER, "virtual_hosts": [host]},
        http_filters=[buffer, router],
    )


def _routes(front: Front) -> list[dict[str, Any]]:
    """Return the routes: too large bodies, the public paths, and 404 for everything else.

    Envoy compares the length that a client states. Fovea counts the bytes of a body without one.
    """
    end = front.body_mib * MIB
    small = typed("filters.http.buffer.v3.BufferPerRoute", buffer={"max_request_bytes": MIB})
    return [
        _refusal(front, 413, {"prefix": "/", "headers": [_length(end + 1, LARGEST)]}),
        {
            "match": {**PUBLIC, "headers": [_length(1, MIB)]},
            "route": _action(front),
            "typed_per_filter_config": {BUFFER: small},
        },
        {"match": PUBLIC, "route": _action(front)},
        _refusal(front, 404, {"prefix": "/"}),
    ]


def _length(least: int, most: int) -> dict[str, Any]:
    """Return the condition that a client states a length of the body in a range, both ends included."""
    return {
        "name": "content-length",
        "range_match": {"start": least, "end": most + 1 if most < LARGEST else most},
    }


def _action(front: Front) -> dict[str, Any]:
    """Return the way of a request to a server, and when it goes to another one.

    The server with the fewest requests is often the one that refuses them all, so that a choice among the
    others takes several attempts.
    """
    previous = {
        "name": "envoy.retry_host_predicates.previous_hosts",
        "typed_config": typed("retry.host.previous_hosts.v3.PreviousHostsPredicate"),
    }
    return {
        "cluster": CLUSTER,
        "timeout": seconds(front.read_s),
        "idle_timeout": seconds(front.read_s),
        "retry_policy": {
            "retry_on": "connect-failure,retriable-status-codes",
            "retriable_status_codes": [503],
            "num_retries": 3,
            "retry_host_predicate": [previous],
            "host_selection_retry_max_attempts": 64,
        },
    }


def _refusal(front: Front, status: int, match: dict[str, Any]) -> dict[str, Any]:
    header = {"header": {"key": "content-type", "value": JSON}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    return {
        "match": match,
        "direct_response": {"status": status, "body": {"inline_string": front.errors[status]}},
        "response_headers_to_add": [header],
    }


def _own_errors(front: Front) -> dict[str, Any]:
    """Return the bodies of answers that Envoy makes itself."""

    def mapper(filter_: dict[str, Any], status: int) -> dict[str, Any]:
        return {
            "filter": filter_,
            "status_code": status,
            "body_format_override": {
                "text_format_source": {"inline_string": front.errors[status]},
                "content_type": JSON,
            },
        }

    mappers = [mapper({"response_flag_filter": {"flags": list(BROKEN_FLAGS)}}, 502)]
    for status in (400, 408, 413, 431, 503, 504):
        comparison = {"op": "EQ", "value": {"default_value": status, "runtime_key": f"fovea.status_{status}"}}
        mappers.append(mapper({"status_code_filter": {"comparison": comparison}}, status))
    return {"mappers": mappers}


PATH = "envoy.yaml"
MOST_CONNECTIONS = 4096


def render(spec: DeploySpec) -> Files:
    """Return envoy.yaml for the machine of the servers."""
    front = front_of(spec, behind_proxy(spec))
    return {PATH: configuration(front, admin_port=service_ports(spec)["envoy-admin"])}


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the commands that check the rendered files."""
    return (check(PATH),)


def check(path: str) -> Check:
    """Return the check of a configuration of Envoy.

    path: its path beneath the output folder.
    """
    arguments = ("--mode", "validate", "--log-level", "error", "--config-path", f"{{dir}}/{path}")
    return Check("envoy", arguments, f"Envoy reads {path}")


def configuration(front: Front, *, admin_port: int) -> str:
    """Return envoy.yaml.

    admin_port: port of Envoy's administration, on the loopback interface.
    """
    monitor = {
        "name": "envoy.resource_monitors.global_downstream_max_connections",
        "typed_config": typed(
            "resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
            max_active_downstream_connections=MOST_CONNECTIONS,
        ),
    }
    values: dict[str, Any] = {
        "admin": {"address": address(LOOPBACK, admin_port)},
        "overload_manager": {"resource_monitors": [monitor]},
        "static_resources": {"listeners": [listener(front)], "clusters": [cluster(front)]},
    }
    head = "# Envoy in front of Fovea, rendered by `fovea deploy render`. docs/deployment.md explains it.\n"
    return head + yaml.safe_dump(values, sort_keys=False, width=110)
