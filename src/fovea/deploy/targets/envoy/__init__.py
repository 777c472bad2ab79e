"""Envoy in front of gateways or engines, with active health checks on /ready.

Bodies of more than 1 MiB pass through. Envoy keeps a copy of each, of at most `max_body_mib`, until the
answer begins, so that it can send the request to another server.
"""

from __future__ import annotations

import ipaddress
import re

import yaml

from fovea.deploy import front as rules
from fovea.deploy.formats import fill_template
from fovea.deploy.front import Front, front_of
from fovea.deploy.machine import LOOPBACK, behind_proxy, service_ports
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files

PATH = "envoy.yaml"
MOST_CONNECTIONS, MOST_REQUESTS = 4096, 4096
MIB = 1024 * 1024


def render(spec: DeploySpec) -> Files:
    """Return envoy.yaml for the machine of the servers."""
    front = front_of(spec, behind_proxy(spec))
    return {PATH: configuration(front, admin_port=service_ports(spec)["envoy-admin"])}


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the commands that check the rendered files."""
    return (check(PATH, tls=spec.tls),)


def check(path: str, *, tls: bool) -> Check:
    """Return the check of a configuration of Envoy.

    path: its path under the output folder.
    tls: whether it names a certificate.
    """
    arguments = ("--mode", "validate", "--log-level", "error", "--config-path", f"{{dir}}/{path}")
    return Check("envoy", arguments, f"Envoy reads {path}", certificate=path if tls else "")


def configuration(front: Front, *, admin_port: int) -> str:
    """Return envoy.yaml.

    admin_port: port of Envoy's administration, on the loopback interface.
    """
    exact, folders = map(re.escape, rules.EXACT), (f"{re.escape(path)}(/.*)?" for path in rules.FOLDERS)
    text = fill_template(
        "envoy/envoy.yaml.j2",
        front=front,
        errors=front.errors,
        admin_port=admin_port,
        all_addresses=all(_is_address(each.host) for each in front.servers),
        body_bytes=front.body_mib * MIB,
        certificate=rules.CERTIFICATE,
        connect_s=rules.CONNECT_S,
        header_kib=rules.HEADER_KIB,
        header_s=rules.HEADER_S,
        headers=rules.HEADERS,
        keep_alive_s=rules.KEEP_ALIVE_S,
        largest=2**63 - 1,
        loopback=LOOPBACK,
        mib=MIB,
        most_connections=MOST_CONNECTIONS,
        most_requests=MOST_REQUESTS,
        private_key=rules.PRIVATE_KEY,
        public="|".join([*exact, *folders]),
    )
    head = "# Envoy in front of Fovea, rendered by `fovea deploy render`. docs/deployment.md explains it.\n"
    return head + yaml.safe_dump(yaml.safe_load(text), sort_keys=False, width=110)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
