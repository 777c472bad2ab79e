"""The whole deployment as a Compose stack on one machine.

Services have no rights that they do not need: a read-only root, no capabilities, no new privileges. Keys are
in files under ./secrets, never in docker-compose.yaml.

Files that are read again when they change are in folders of their own, and the folders are mounted. A mount
of a file would keep showing the old one: editors and `fovea keys` write a new file and rename it.

NGINX reads addresses once, when it starts. So the servers behind it have fixed ones.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import yaml

from fovea.core.errors import ConfigError
from fovea.deploy import tracing
from fovea.deploy.formats import fill_template, toml_text
from fovea.deploy.front import CERTIFICATE, PATIENCE_S, front_of, redirects
from fovea.deploy.machine import (
    Server,
    backend_tables,
    behind_proxy,
    engines,
    gateways,
    redis_values,
)  # fmt: skip
from fovea.deploy.monitoring.files import grafana_files, monitoring_checks, prometheus_files
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import Check, Files
from fovea.deploy.targets import nginx
from fovea.deploy.targets.docker import HOME, USER_ID
from fovea.deploy.targets.local import redis_configuration
from fovea.deploy.tracing import has_jaeger, trace_values, tracing_checks

PATH = "docker-compose.yaml"
COMMENT = "Rendered by `fovea deploy render --target compose`. docs/deployment.md explains it."
FRONT_NETWORK = ipaddress.IPv4Network("10.213.0.0/20")
ENGINE_NETWORK = ipaddress.IPv4Network("10.213.16.0/20")
PROXY_ADDRESS = str(FRONT_NETWORK[4])
FIRST_FIXED = 16
MOST_FIXED = FRONT_NETWORK.num_addresses - FIRST_FIXED - 1
KEYS = "/etc/fovea/keys"
METRICS_KEY = "/etc/fovea/metrics/metrics-key"
WEBHOOK = "alert-webhook"
"""Name of the secret with the URL of `alert_webhook_file`."""
PLAIN_PORT, TLS_PORT = 8080, 8443
"""Ports of NGINX in its container, which may not open ports below 1024."""
COLLECTOR = "collector"
PROGRAMS = (("docker", "compose"), ("docker-compose",), ("podman", "compose"), ("podman-compose",))
"""The programs that read Compose files, in the order in which they are looked for."""
BODIES = "/var/cache/nginx/fovea"
"""Beginning of the paths of NGINX's temporary files, in a volume: bodies can be large."""
LOAD_S = 900
"""Seconds in which an engine may load its model, or download it. A gateway is ready when an engine is."""
PROBE = (
    "import urllib.request as u; "
    "u.build_opener(u.ProxyHandler({{}})).open('http://127.0.0.1:{port}/ready', timeout=4)"
)


class _Dumper(yaml.SafeDumper):
    """Writes equal values in full, without YAML's references."""

    def ignore_aliases(self, data: object) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _Service:
    """An engine or a gateway of the stack.

    address: its fixed address in the network of the proxy; "": it is not behind the proxy.
    device: its GPU; "": none.
    """

    name: str
    pool: Pool | None
    address: str
    device: str = ""


def render(spec: DeploySpec) -> Files:
    """Return docker-compose.yaml and the configuration of every service."""
    inner, port = (gateways(spec), spec.gateway_port) if spec.gateway else (engines(spec), spec.engine_port)
    behind = [Server(each.name, _fixed_address(number), port) for number, each in enumerate(inner)]
    addresses = (
        [f"{each.name}:{spec.engine_port}" for each in engines(spec)],
        [f"{each.name}:{spec.gateway_port}" for each in gateways(spec)],
    )
    files = {
        PATH: _compose(spec),
        # Docker takes connections over IPv6, and passes them on over IPv4.
        "nginx/nginx.conf": nginx.configuration(
            replace(front_of(spec, behind, port=_nginx_port(spec), redirect=PLAIN_PORT), ipv6=False),
            temporary=BODIES,
            http2_line=True,
        ),
        **prometheus_files(
            spec, *addresses, "alertmanager:9093", key_file=METRICS_KEY, url_file=f"/run/secrets/{WEBHOOK}"
        ),
        **{f"{part}/config.yaml": text for part, text in tracing.configs(spec).items()},
        **grafana_files(spec),
    }
    for pool in spec.pools:
        files[f"pool-{pool.name}.toml"] = toml_text(_engine_settings(spec, pool), comment=COMMENT)
    if spec.gateway is not None:
        backends = tuple(Server(each.name, each.name, spec.engine_port) for each in engines(spec))
        files["gateway/gateway.toml"] = toml_text(
            _gateway_settings(spec), backend_tables(backends), comment=COMMENT
        )
    if spec.redis is not None:
        files["redis.conf"] = redis_configuration(spec, port=6379, address="*", folder="/data")
    return files


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the commands that check the rendered files."""
    arguments = ("--file", f"{{dir}}/{PATH}", "config", "--quiet")
    compose = Check("docker compose", arguments, f"Compose reads {PATH}", programs=PROGRAMS)
    return (compose, *monitoring_checks(spec), *tracing_checks(spec, "{part}/config.yaml"))


def _compose(spec: DeploySpec) -> str:
    text = fill_template(
        "compose/services.yaml.j2",
        **{name: spec.images.of(name) for name in asdict(spec.images)},
        spec=spec,
        engines=list(_engines(spec)),
        gateways=[
            _Service(each.name, None, _fixed_address(number)) for number, each in enumerate(gateways(spec))
        ],
        behind=[each.name for each in behind_proxy(spec)],
        certificates=str(PurePosixPath(CERTIFICATE).parent),
        config="/etc/fovea/config.toml",
        gateway_folder="/etc/fovea/gateway",
        home=HOME,
        keys=KEYS,
        load_s=LOAD_S,
        jaeger_runs=has_jaeger(spec),
        metrics_folder=str(PurePosixPath(METRICS_KEY).parent),
        nginx_port=_nginx_port(spec),
        redirects=redirects(spec),
        plain_port=PLAIN_PORT,
        patience_s=PATIENCE_S,
        probe=PROBE,
        proxy_address=PROXY_ADDRESS,
        tracing=tracing,
        user=f"{USER_ID}:{USER_ID}",
        wget=["wget", "-q"],
    )
    services: dict[str, Any] = yaml.safe_load(text)
    values: dict[str, Any] = {
        "name": spec.name,
        "services": services,
        "networks": _networks(spec),
        "volumes": {name: {} for name in _sources(services, "volume")},
        **_secrets(services, {WEBHOOK: spec.monitoring.alert_webhook_file} if spec.monitoring else {}),
    }
    head = "".join(f"# {line}".rstrip() + "\n" for line in _head(spec).splitlines())
    return head + yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=110)


def _nginx_port(spec: DeploySpec) -> int:
    return TLS_PORT if spec.tls else PLAIN_PORT


def _engines(spec: DeploySpec) -> Iterator[_Service]:
    """Yield the engines. Each CUDA engine has GPUs of its own. Raises ConfigError for a model's path."""
    gpus = 0
    for number, engine in enumerate(engines(spec)):
        pool = engine.pool
        assert pool is not None
        if pool.model.startswith("~"):
            raise ConfigError(
                f"[[pool]] {pool.name!r}: model is {pool.model!r}; accepted in containers: an absolute "
                "folder, a hub id, or fovea-tiny",
                param="model",
            )
        device = ""
        if pool.hardware == "cuda":
            device = f"{gpus}:0" if pool.mig else ",".join(map(str, range(gpus, gpus + pool.devices)))
            gpus += pool.devices
        yield _Service(engine.name, pool, "" if spec.gateway else _fixed_address(number), device)


def _fixed_address(number: int) -> str:
    """Return the fixed address of a server behind the proxy. Raises ConfigError if there are too many."""
    if number >= MOST_FIXED:
        raise ConfigError(
            f"too many servers for one Compose stack; accepted: at most {MOST_FIXED} replicas in all",
            param="replicas",
        )
    return str(FRONT_NETWORK[FIRST_FIXED + number])


def _networks(spec: DeploySpec) -> dict[str, Any]:
    """Return all networks. Internal ones have no way out of the machine."""
    found: dict[str, Any] = {
        "public": {},
        "front": {"internal": True, "ipam": {"config": [{"subnet": str(FRONT_NETWORK)}]}},
        "engines": {"ipam": {"config": [{"subnet": str(ENGINE_NETWORK)}]}},
    }
    if spec.redis is not None:
        found["data"] = {"internal": True}
    if spec.monitoring is not None:
        found["monitoring"] = {}
    if spec.tracing is not None:
        found["traces"] = {}
    return found


def _engine_settings(spec: DeploySpec, pool: Pool) -> dict[str, Any]:
    """Return the settings of a pool's engines in containers. The pool's own settings win."""
    inner = str(ENGINE_NETWORK) if spec.gateway else PROXY_ADDRESS
    values: dict[str, Any] = {"trusted_proxies": [inner, *spec.trusted_proxies]}
    if spec.gateway is None:
        values["keys_file"] = f"{KEYS}/keys.toml"
    values |= trace_values(spec, COLLECTOR)
    return {**values, **spec.engine_settings(pool), "host": "0.0.0.0", "port": spec.engine_port}


def _gateway_settings(spec: DeploySpec) -> dict[str, Any]:
    """Return the settings of the gateways in containers. The spec's own settings win."""
    return {
        "trusted_proxies": [PROXY_ADDRESS, *spec.trusted_proxies],
        "keys_file": f"{KEYS}/keys.toml",
        **redis_values(spec, "redis:6379"),
        **trace_values(spec, COLLECTOR),
        **spec.gateway_settings(),
        "host": "0.0.0.0",
        "port": spec.gateway_port,
    }


def _sources(services: dict[str, Any], kind: str) -> list[str]:
    mounts = [mount for each in services.values() for mount in each.get("volumes", ())]
    return list(dict.fromkeys(mount["source"] for mount in mounts if mount["type"] == kind))


def _secrets(services: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    """Return the table of secrets, files that are mounted at the start only; empty if there are none.

    places: paths of those that are not in ./secrets.
    """
    names = dict.fromkeys(name for each in services.values() for name in each.get("secrets", ()))
    return (
        {"secrets": {name: {"file": places.get(name) or f"./secrets/{name}"} for name in names}}
        if names
        else {}
    )


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
        if spec.monitoring.alert_webhook_file:
            lines.append(f"    the URL that gets alerts into {spec.monitoring.alert_webhook_file}")
    if spec.tls:
        lines.append("    the certificate and its key into secrets/tls/tls.crt and secrets/tls/tls.key")
    lines.append("docs/deployment.md tells who must be able to read these files.")
    return "\n".join(lines)
