"""The whole deployment as a Compose stack on one machine.

Services have no rights that they do not need: a read-only root, no capabilities, no new privileges. Keys are
in files beneath ./secrets, never in docker-compose.yaml.
"""

from __future__ import annotations

from typing import Any

import yaml

from fovea.deploy.front import front_of
from fovea.deploy.machine import Server, backend_tables, behind_proxy, engines
from fovea.deploy.monitoring_files import grafana_files, monitoring_checks, prometheus_files
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files
from fovea.deploy.targets import nginx
from fovea.deploy.targets.compose import others, servers
from fovea.deploy.targets.compose.network import networks
from fovea.deploy.targets.local import redis_configuration
from fovea.deploy.toml_text import toml_text

PATH = "docker-compose.yaml"
COMMENT = "Rendered by `fovea deploy render --target compose`. docs/deployment.md explains it."


class _Dumper(yaml.SafeDumper):
    """Writes equal values in full, without YAML's references."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def render(spec: DeploySpec) -> Files:
    """Return docker-compose.yaml and the configuration of every service."""
    front = front_of(spec, servers.behind(spec), port=others.PORT)
    addresses = servers.metrics_addresses(spec)
    files = {
        PATH: _compose(spec),
        "nginx.conf": nginx.configuration(front, temporary=others.BODIES),
        **prometheus_files(spec, *addresses, "alertmanager:9093", key_file="/run/secrets/metrics-key"),
        **grafana_files(spec),
    }
    for pool in spec.pools:
        files[f"pool-{pool.name}.toml"] = toml_text(servers.engine_settings(spec, pool), comment=COMMENT)
    if spec.gateway is not None:
        inner = tuple(Server(each.name, each.name, spec.engine_port) for each in engines(spec))
        files["gateway.toml"] = toml_text(
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
        "secrets": {name: {"file": f"./secrets/{name}"} for name in _secrets(services)},
    }
    head = "".join(f"# {line}".rstrip() + "\n" for line in _head(spec).splitlines())
    return head + yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=110)


def _sources(services: dict[str, Any], kind: str) -> list[str]:
    mounts = [mount for each in services.values() for mount in each.get("volumes", ())]
    return list(dict.fromkeys(mount["source"] for mount in mounts if mount["type"] == kind))


def _secrets(services: dict[str, Any]) -> list[str]:
    named = [secret for each in services.values() for secret in each.get("secrets", ())]
    return list(dict.fromkeys(each["source"] if isinstance(each, dict) else each for each in named))


def _head(spec: DeploySpec) -> str:
    lines = [COMMENT, "", "Before the first start:", "    mkdir -m 755 secrets"]
    kind = "--for gateway " if spec.gateway is not None else ""
    lines.append(f"    fovea keys new {kind}--file secrets/keys.toml --name NAME")
    if spec.monitoring is not None:
        lines.append(
            f"    fovea keys new {kind}--file secrets/keys.toml --name prometheus --role metrics"
            "    # the key into secrets/metrics-key"
        )
        if spec.monitoring.grafana:
            lines.append("    the password of Grafana's user admin into secrets/grafana-password")
    if spec.tls:
        lines.append("    the certificate and its key into secrets/tls.crt and secrets/tls.key")
    lines.append("docs/deployment.md tells who must be able to read these files.")
    return "\n".join(lines)
