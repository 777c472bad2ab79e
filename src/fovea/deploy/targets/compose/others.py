"""NGINX, Redis, Prometheus, Alertmanager and Grafana of the Compose stack."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from fovea.deploy.front import CERTIFICATE, PATIENCE_S
from fovea.deploy.monitoring_files import ALERTMANAGER as ALERTMANAGER_FILE
from fovea.deploy.spec import DeploySpec
from fovea.deploy.targets.compose import network
from fovea.deploy.targets.compose.service import data_mount, file_mount, service

NGINX = "nginxinc/nginx-unprivileged:1.27.4-alpine"
REDIS = "redis:7.4.2-alpine"
PROMETHEUS = "prom/prometheus:v3.2.1"
ALERTMANAGER = "prom/alertmanager:v0.28.1"
GRAFANA = "grafana/grafana:11.6.0"
METRICS_KEY = "/etc/fovea/metrics/metrics-key"
PORT = 8080
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
        health=["wget", "-q", *flags, "-O", "/dev/null", f"{scheme}://127.0.0.1:{PORT}/health"],
        cpus=2,
        memory_mib=1024,
        stop_s=spec.stop.drain_s + PATIENCE_S,
        stop_signal="SIGQUIT",
        ports=[{"target": PORT, "published": spec.proxy_port, "protocol": "tcp"}],
        volumes=mounts,
        networks={"public": {}, "front": {"ipv4_address": network.PROXY}},
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
