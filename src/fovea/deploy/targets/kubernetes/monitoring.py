"""The pods that the Prometheus operator scrapes, and the rules of recording and alerts."""

from __future__ import annotations

from typing import Any

from fovea.deploy.spec import DeploySpec, Monitoring
from fovea.deploy.targets.kubernetes.objects import POOL_LABEL, PORT, Manifest, manifest, part_name, selector

JOBS = {"engine": "fovea", "gateway": "fovea-gateway"}
"""Names of the jobs by component. Rules and dashboards find the servers by them."""


def objects(spec: DeploySpec, monitoring: Monitoring) -> dict[str, list[Manifest]]:
    """Return all objects of the monitoring by file."""
    return {"pod-monitors.yaml": pod_monitors(spec, monitoring)}


def pod_monitors(spec: DeploySpec, monitoring: Monitoring) -> list[Manifest]:
    """A PodMonitor for the engines and one for the gateways."""
    components = ["engine", *(["gateway"] if spec.gateway is not None else [])]
    return [_pod_monitor(spec, monitoring, component) for component in components]


def _pod_monitor(spec: DeploySpec, monitoring: Monitoring, component: str) -> Manifest:
    endpoint: dict[str, Any] = {
        "port": PORT,
        "path": "/metrics",
        "interval": f"{monitoring.scrape_s}s",
        "relabelings": [{"action": "replace", "targetLabel": "job", "replacement": JOBS[component]}],
    }
    if component == "gateway":
        secret = {"name": part_name(spec, "keys"), "key": "admin-key"}
        endpoint["authorization"] = {"type": "Bearer", "credentials": secret}
    body = {
        "selector": {"matchLabels": selector(spec, component)},
        "podTargetLabels": [POOL_LABEL],
        "podMetricsEndpoints": [endpoint],
    }
    name = part_name(spec, component)
    return manifest(spec, "monitoring.coreos.com/v1 PodMonitor", name, {"spec": body}, component)
