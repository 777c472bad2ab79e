"""The services of the Compose stack, and the networks between them.

NGINX reads addresses once, when it starts. So the servers behind it have fixed ones.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from fovea.core.errors import ConfigError
from fovea.deploy.front import CERTIFICATE, PATIENCE_S
from fovea.deploy.machine import Server, engines, gateways, redis_values, trace_values
from fovea.deploy.monitoring.files import ALERTMANAGER_PATH as ALERTMANAGER_FILE
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.targets.docker import HOME, USER_ID

FRONT_NETWORK, ENGINE_NETWORK = (
    ipaddress.IPv4Network("10.213.0.0/20"),
    ipaddress.IPv4Network("10.213.16.0/20"),
)
PROXY_ADDRESS = str(FRONT_NETWORK[4])
FIRST_FIXED = 16
MOST_FIXED = FRONT_NETWORK.num_addresses - FIRST_FIXED - 1


def fixed_address(number: int) -> str:
    """Return the fixed address of a server behind the proxy. Raises ConfigError if there are too many."""
    if number >= MOST_FIXED:
        raise ConfigError(
            f"more than {MOST_FIXED} servers do not fit into one Compose stack; accepted: fewer replicas",
            param="replicas",
        )
    return str(FRONT_NETWORK[FIRST_FIXED + number])


def networks(*, monitoring: bool, redis: bool) -> dict[str, Any]:
    """Return all networks. Internal ones have no way out of the machine."""
    found: dict[str, Any] = {
        "public": {},
        "front": {"internal": True, "ipam": {"config": [{"subnet": str(FRONT_NETWORK)}]}},
        "engines": {"ipam": {"config": [{"subnet": str(ENGINE_NETWORK)}]}},
    }
    if redis:
        found["data"] = {"internal": True}
    if monitoring:
        found["monitoring"] = {}
    return found


def service(
    image: str,
    command: Sequence[str],
    *,
    health: Sequence[str],
    cpus: float,
    memory_mib: int,
    user: str = "",
    start_s: int = 30,
    stop_s: int = 10,
    temporary_mib: int = 64,
    **more: Any,
) -> dict[str, Any]:
    """Return a service without rights that it does not need.

    image: image with its tag.
    command: arguments of the image's entry point.
    health: command that succeeds if the service can be used.
    cpus, memory_mib: most processors and memory.
    user: user and group; "": those of the image.
    start_s: seconds in which failed health checks do not count.
    stop_s: seconds between SIGTERM and SIGKILL.
    temporary_mib: size of /tmp.
    more: further keys.
    """
    resources = {"limits": {"cpus": f"{cpus:g}", "memory": f"{memory_mib}m"}}
    reservations = more.pop("reservations", None)
    if reservations:
        resources["reservations"] = reservations
    values: dict[str, Any] = {
        "image": image,
        "command": list(command),
        "restart": "unless-stopped",
        **({"user": user} if user else {}),
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "pids_limit": 4096,
        "tmpfs": [f"/tmp:mode=1777,nosuid,nodev,exec,size={temporary_mib}m"],
        "stop_grace_period": f"{stop_s}s",
        "healthcheck": {
            "test": ["CMD", *health],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{start_s}s",
        },
        "deploy": {"resources": resources},
        "logging": {"driver": "json-file", "options": {"max-size": "20m", "max-file": "5"}},
    }
    return {**values, **more}


def file_mount(source: str, target: str) -> dict[str, Any]:
    """Return a mount of a file or folder beside docker-compose.yaml, or of an absolute path, read-only.

    If the source is missing, Docker fails and creates no folder in its place.
    """
    path = source if source.startswith("/") else f"./{source}"
    return {
        "type": "bind",
        "source": path,
        "target": target,
        "read_only": True,
        "bind": {"create_host_path": False},
    }


def data_mount(volume: str, target: str) -> dict[str, Any]:
    """Return a mount of a volume for data."""
    return {"type": "volume", "source": volume, "target": target}


KEYS = "/etc/fovea/keys"
CONFIG = "/etc/fovea/config.toml"
GATEWAY = "/etc/fovea/gateway"
LOAD_S = 900
"""Seconds in which an engine may load its model, or download it."""


def engine_services(spec: DeploySpec) -> dict[str, Any]:
    """Return the services of all engines. Each CUDA engine has a GPU of its own."""
    found = {}
    gpu = 0
    for number, engine in enumerate(engines(spec)):
        pool = _pool(engine)
        devices: list[str] = []
        if pool.hardware == "cuda":
            devices = [str(gpu)]
            gpu += 1
        address = None if spec.gateway is not None else fixed_address(number)
        found[engine.name] = _engine(spec, engine, address, devices)
    return found


def gateway_services(spec: DeploySpec) -> dict[str, Any]:
    """Return the services of all gateways."""
    return {each.name: _gateway(spec, each, number) for number, each in enumerate(gateways(spec))}


def servers_behind(spec: DeploySpec) -> tuple[Server, ...]:
    """Return the servers behind the proxy with their fixed addresses."""
    inner, port = (gateways(spec), spec.gateway_port) if spec.gateway else (engines(spec), spec.engine_port)
    return tuple(Server(each.name, fixed_address(number), port) for number, each in enumerate(inner))


def engine_settings(spec: DeploySpec, pool: Pool) -> dict[str, Any]:
    """Return the settings of a pool's engines in containers. The pool's own settings win."""
    values: dict[str, Any] = {"trusted_proxies": [str(ENGINE_NETWORK) if spec.gateway else PROXY_ADDRESS]}
    if spec.gateway is None:
        values["keys_file"] = f"{KEYS}/keys.toml"
    values |= trace_values(spec)
    return {**values, **spec.engine_settings(pool), "host": "0.0.0.0", "port": spec.engine_port}


def gateway_settings(spec: DeploySpec) -> dict[str, Any]:
    """Return the settings of the gateways in containers. The spec's own settings win."""
    return {
        "trusted_proxies": [PROXY_ADDRESS],
        "keys_file": f"{KEYS}/keys.toml",
        **redis_values(spec, "redis:6379"),
        **trace_values(spec),
        **spec.gateway_settings(),
        "host": "0.0.0.0",
        "port": spec.gateway_port,
    }


def metrics_addresses(spec: DeploySpec) -> tuple[list[str], list[str]]:
    """Return the addresses of engines and gateways for Prometheus."""
    return (
        [f"{each.name}:{spec.engine_port}" for each in engines(spec)],
        [f"{each.name}:{spec.gateway_port}" for each in gateways(spec)],
    )


def _engine(spec: DeploySpec, engine: Server, address: str | None, devices: Sequence[str]) -> dict[str, Any]:
    pool = _pool(engine)
    volume = f"{pool.name}-data"
    mounts = [file_mount(f"pool-{pool.name}.toml", CONFIG), data_mount(volume, HOME)]
    if pool.model.startswith("~"):
        raise ConfigError(
            f"[[pool]] {pool.name!r}: model is {pool.model!r}; accepted in containers: an absolute folder, a "
            "hub id, or fovea-tiny",
            param="model",
        )
    if pool.model.startswith("/"):
        mounts.append(file_mount(pool.model, pool.model))
    more: dict[str, Any] = {}
    if devices:
        more["reservations"] = {
            "devices": [
                {
                    "driver": "nvidia",
                    "device_ids": [f"{device}:0" if pool.mig else device for device in devices],
                    "capabilities": ["gpu"],
                }
            ]
        }
    return _server(
        spec,
        spec.image_of(pool),
        ("serve", "--config", CONFIG),
        spec.engine_port,
        cpus=pool.cpus,
        memory_mib=pool.memory_gib * 1024,
        temporary_mib=1024,
        start_s=LOAD_S,
        stop_s=spec.stop_of(pool).grace_s,
        keys=spec.gateway is None,
        volumes=mounts,
        networks=_networks(spec, address, inner="engines"),
        **more,
    )


def _gateway(spec: DeploySpec, gateway: Server, number: int) -> dict[str, Any]:
    assert spec.gateway is not None
    needed = {"redis": {"condition": "service_healthy"}} if spec.redis else {}
    names = _networks(spec, fixed_address(number), inner="engines")
    if spec.redis:
        names["data"] = {}
    return _server(
        spec,
        spec.image,
        ("gateway", "--config", f"{GATEWAY}/gateway.toml"),
        spec.gateway_port,
        cpus=spec.gateway.cpus,
        memory_mib=spec.gateway.memory_gib * 1024,
        start_s=LOAD_S,  # it is ready when an engine is
        stop_s=spec.stop.grace_s,
        keys=True,
        volumes=[file_mount("gateway", GATEWAY)],
        networks=names,
        **({"depends_on": needed} if needed else {}),
    )


def _server(
    spec: DeploySpec, image: str, command: Sequence[str], port: int, *, keys: bool, **more: Any
) -> dict[str, Any]:
    probe = (
        "import urllib.request as u; "
        f"u.build_opener(u.ProxyHandler({{}})).open('http://127.0.0.1:{port}/ready', timeout=4)"
    )
    environment = {"FOVEA_PORT": str(port)}
    if keys:
        more["volumes"] = [*more["volumes"], file_mount("secrets/keys", KEYS)]
    return service(
        image,
        command,
        user=f"{USER_ID}:{USER_ID}",
        health=["python", "-c", probe],
        environment=environment,
        ulimits={"nofile": {"soft": 65536, "hard": 65536}},
        **more,
    )


def _networks(spec: DeploySpec, address: str | None, *, inner: str) -> dict[str, Any]:
    found: dict[str, Any] = {inner: {}}
    if address is not None:
        found["front"] = {"ipv4_address": address}
    if spec.monitoring is not None:
        found["monitoring"] = {}
    return found


def _pool(engine: Server) -> Pool:
    assert engine.pool is not None
    return engine.pool


NGINX = "nginxinc/nginx-unprivileged:1.27.4-alpine"
REDIS = "redis:7.4.2-alpine"
PROMETHEUS = "prom/prometheus:v3.2.1"
ALERTMANAGER = "prom/alertmanager:v0.28.1"
GRAFANA = "grafana/grafana:11.6.0"
METRICS_KEY = "/etc/fovea/metrics/metrics-key"
NGINX_PORT = 8080
"""Port of NGINX in its container, which may not open ports below 1024."""
BODIES = "/var/cache/nginx/fovea"
"""Beginning of the paths of NGINX's temporary files, in a volume: bodies can be large."""


def nginx_service(spec: DeploySpec, behind: list[str]) -> dict[str, Any]:
    """Return NGINX. behind: names of the services behind it."""
    scheme, flags = ("https", ["--no-check-certificate"]) if spec.tls else ("http", [])
    mounts = [file_mount("nginx", "/etc/fovea/nginx"), data_mount("bodies", "/var/cache/nginx")]
    if spec.tls:
        mounts.append(file_mount("secrets/tls", str(PurePosixPath(CERTIFICATE).parent)))
    return service(
        NGINX,
        ["nginx", "-c", "/etc/fovea/nginx/nginx.conf", "-g", "daemon off; pid /tmp/nginx.pid;"],
        health=["wget", "-q", *flags, "-O", "/dev/null", f"{scheme}://127.0.0.1:{NGINX_PORT}/health"],
        cpus=2,
        memory_mib=1024,
        stop_s=spec.stop.drain_s + PATIENCE_S,
        stop_signal="SIGQUIT",
        ports=[{"target": NGINX_PORT, "published": spec.proxy_port, "protocol": "tcp"}],
        volumes=mounts,
        networks={"public": {}, "front": {"ipv4_address": PROXY_ADDRESS}},
        depends_on={name: {"condition": "service_healthy"} for name in behind},
    )


def redis_service(spec: DeploySpec) -> dict[str, Any]:
    """Return Redis."""
    assert spec.redis is not None
    return service(
        REDIS,
        ["redis-server", "/etc/redis.conf"],
        user="999:1000",  # the image's own user, so that its entry point need not change users
        health=["redis-cli", "ping"],
        cpus=1,
        memory_mib=spec.redis.memory_mib * 2 + 128,  # a copy of the data while it is written anew
        stop_s=30,
        volumes=[file_mount("redis.conf", "/etc/redis.conf"), data_mount("redis", "/data")],
        networks={"data": {}},
    )


def monitoring_services(spec: DeploySpec) -> dict[str, Any]:
    """Return Prometheus, Alertmanager and Grafana, as far as the spec has them."""
    if spec.monitoring is None:
        return {}
    found = {"prometheus": _prometheus(spec)}
    if spec.monitoring.alert_webhook:
        found["alertmanager"] = _alertmanager()
    if spec.monitoring.grafana:
        found["grafana"] = _grafana()
    return found


def _prometheus(spec: DeploySpec) -> dict[str, Any]:
    assert spec.monitoring is not None
    return service(
        PROMETHEUS,
        [
            "--config.file=/etc/prometheus/prometheus.yml",
            "--storage.tsdb.path=/prometheus",
            f"--storage.tsdb.retention.time={spec.monitoring.retention_days}d",
        ],
        health=_wget("http://127.0.0.1:9090/-/ready"),
        cpus=1,
        memory_mib=2048,
        stop_s=60,
        ports=[_loopback(9090)],
        volumes=[
            file_mount("prometheus", "/etc/prometheus"),
            file_mount("secrets/metrics", str(PurePosixPath(METRICS_KEY).parent)),
            data_mount("prometheus", "/prometheus"),
        ],
        networks={"monitoring": {}},
    )


def _alertmanager() -> dict[str, Any]:
    return service(
        ALERTMANAGER,
        [
            f"--config.file=/etc/{ALERTMANAGER_FILE}",
            "--storage.path=/alertmanager",
            "--cluster.listen-address=",
        ],
        health=_wget("http://127.0.0.1:9093/-/ready"),
        cpus=0.5,
        memory_mib=256,
        volumes=[
            file_mount("alertmanager", "/etc/alertmanager"),
            data_mount("alertmanager", "/alertmanager"),
        ],
        networks={"monitoring": {}},
    )


def _grafana() -> dict[str, Any]:
    return service(
        GRAFANA,
        [],
        health=_wget("http://127.0.0.1:3000/api/health"),
        cpus=1,
        memory_mib=512,
        environment={
            "GF_SECURITY_ADMIN_PASSWORD__FILE": "/run/secrets/grafana-password",
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        },
        ports=[_loopback(3000)],
        secrets=["grafana-password"],
        volumes=[
            file_mount("grafana/provisioning", "/etc/grafana/provisioning"),
            file_mount("grafana/dashboards", "/var/lib/grafana/dashboards"),
            data_mount("grafana", "/var/lib/grafana"),
        ],
        networks={"monitoring": {}},
        depends_on={"prometheus": {"condition": "service_healthy"}},
    )


def _loopback(port: int) -> dict[str, Any]:
    """Return a port that only this machine reaches."""
    return {"target": port, "published": port, "host_ip": "127.0.0.1", "protocol": "tcp"}


def _wget(url: str) -> list[str]:
    return ["wget", "-q", "-O", "/dev/null", url]
