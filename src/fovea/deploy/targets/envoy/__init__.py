"""Envoy in front of gateways or engines, with active health checks on /ready.

Bodies of more than 1 MiB pass through. Envoy keeps a copy of each, of at most `max_body_mib`, until the
answer begins, so that it can send the request to another server.
"""

from __future__ import annotations

from typing import Any

import yaml

from fovea.deploy.front import Front, front_of
from fovea.deploy.machine import LOOPBACK, behind_proxy, service_ports
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.envoy.cluster import cluster
from fovea.deploy.targets.envoy.listener import listener
from fovea.deploy.targets.envoy.typed import address, typed

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
