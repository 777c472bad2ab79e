"""The whole deployment as a Compose stack on one machine.

Services have no rights that they do not need: a read-only root, no capabilities, no new privileges. Keys are
in files beneath ./secrets, never in docker-compose.yaml.

Files that are read again when they change are in folders of their own, and the folders are mounted. A mount
of a file would keep showing the old one: editors and `fovea keys` write a new file and rename it.
"""

from __future__ import annotations

from typing import Any

import yaml

from fovea.deploy.formats import toml_text
from fovea.deploy.front import front_of
from fovea.deploy.machine import Server, backend_tables, behind_proxy, engines
from fovea.deploy.monitoring.files import grafana_files, monitoring_checks, prometheus_files
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files
from fovea.deploy.targets import nginx
from fovea.deploy.targets.compose import services as others
from fovea.deploy.targets.compose import services as servers
from fovea.deploy.targets.compose.services import networks
from fovea.deploy.targets.local import redis_configuration

PATH = "docker-compose.yaml"
COMMENT = "Rendered by `fovea deploy render --target compose`. docs/deployment.md explains it."


class _Dumper(yaml.SafeDumper):
    """Writes equal values in full, without YAML's references."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def render(spec: DeploySpec) -> Files:
    """Return docker-compose.yaml and the configuration of every service."""
    front = front_of(spec, servers.servers_behind(spec), port=others.NGINX_PORT)
    addresses = servers.metrics_addresses(spec)
    files = {
        PATH: _compose(spec),
        "nginx/nginx.conf": nginx.configuration(front, temporary=others.BODIES),
        **prometheus_files(spec, *addresses, "alertmanager:9093", key_file=others.METRICS_KEY),
        **grafana_files(spec),
    }
    for pool in spec.pools:
        files[f"pool-{pool.name}.toml"] = toml_text(servers.engine_settings(spec, pool), comment=COMMENT)
    if spec.gateway is not None:
        inner = tuple(Server(each.name, each.name, spec.engine_port) for each in engines(spec))
        files["gateway/gateway.toml"] = toml_text(
            servers.gateway_settings(spec), backend_tables(inner), comment=COMMENT
        )
    if spec.redis is not None:
        files["redis.conf"] = redis_configuration(spec, port=6379, address="*", folder="/data")
    return files


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the commands that check the rendered files."""
    arguments = ("--file", f"{{dir}}/{PATH}", "config", "--quiet")
    return (Check("docker-compose", arguments, f"Compose reads {PATH}"), *monitoring_checks(spec))


def _compose(spec: DeploySpec) -> str:
    behind = [each.name for each in behind_proxy(spec)]
    services = {
        **servers.engine_services(spec),
        **servers.gateway_services(spec),
        **({"redis": others.redis_service(spec)} if spec.redis else {}),
        "nginx": others.nginx_service(spec, behind),
        **others.monitoring_services(spec),
    }
    watched = spec.monitoring is not None
    values: dict[str, Any] = {
        "name": spec.name,
        "services": services,
        "networks": networks(monitoring=watched, redis=spec.redis is not None),
        "volumes": {name: {} for name in _sources(services, "volume")},
        **_secrets(services),
    }
    head = "".join(f"# {line}".rstrip() + "\n" for line in _head(spec).splitlines())
    return head + yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=110)


def _sources(services: dict[str, Any], kind: str) -> list[str]:
    mounts = [mount for each in services.values() for mount in each.get("volumes", ())]
    return list(dict.fromkeys(mount["source"] for mount in mounts if mount["type"] == kind))


def _secrets(services: dict[str, Any]) -> dict[str, Any]:
    """Return the table of secrets, files that are read at the start only; empty if there are none."""
    names = dict.fromkeys(name for each in services.values() for name in each.get("secrets", ()))
    return {"secrets": {name: {"file": f"./secrets/{name}"} for name in names}} if names else {}


def _head(spec: DeploySpec) -> str:
    folders = ["secrets", "secrets/keys"]
    folders += ["secrets/metrics"] if spec.monitoring is not None else []
    folders += ["secrets/tls"] if spec.tls else []
    lines = [COMMENT, "", "Before the first start:", f"    mkdir -m 755 {' '.join(folders)}"]
    kind = "--for gateway " if spec.gateway is not None else ""
    lines.append(f"    fovea keys new {kind}--file secrets/keys/keys.toml --name NAME")
    if spec.monitoring is not None:
        lines.append(
            f"    fovea keys new {kind}--file secrets/keys/keys.toml --name prometheus --role metrics"
            "    # the key into secrets/metrics/metrics-key"
        )
        if spec.monitoring.grafana:
            lines.append("    the password of Grafana's user admin into secrets/grafana-password")
    if spec.tls:
        lines.append("    the certificate and its key into secrets/tls/tls.crt and secrets/tls/tls.key")
    lines.append("docs/deployment.md tells who must be able to read these files.")
    return "\n".join(lines)
