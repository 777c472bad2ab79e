"""The pods that the Prometheus operator scrapes, and the rules of recording and alerts."""

from __future__ import annotations

import json
from typing import Any

import yaml

from fovea.deploy.monitoring import files
from fovea.deploy.spec import DeploySpec, Monitoring
from fovea.deploy.targets.kubernetes.objects import POOL_LABEL, PORT, Manifest, manifest, part_name, selector

DASHBOARD_LABEL = "grafana_dashboard"
"""Label of the ConfigMaps that the sidecar of Grafana's chart loads."""
JOBS = {"engine": "fovea", "gateway": "fovea-gateway"}
"""Names of the jobs by component. Rules and dashboards find the servers by them."""


def rules(spec: DeploySpec) -> Manifest:
    """The recording rules and the alerts as one object."""
    runbooks = spec.monitoring.runbooks if spec.monitoring is not None else ""
    groups = [
        group
        for text in (files.recording_rules(), files.alert_rules(runbooks or files.RUNBOOKS))
        for group in yaml.safe_load(text)["groups"]
    ]
    return manifest(
        spec,
        "monitoring.coreos.com/v1 PrometheusRule",
        part_name(spec, "rules"),
        {"spec": {"groups": groups}},
    )


def dashboards(spec: DeploySpec) -> list[Manifest]:
    """A ConfigMap for each dashboard. Grafana's sidecar finds them by their label, in any namespace."""
    found = []
    for name, text in files.dashboards().items():
        data = {name: json.dumps(json.loads(text), separators=(",", ":")) + "\n"}
        place = part_name(spec, f"dashboard-{name.removesuffix('.json')}")
        config_map = manifest(spec, "v1 ConfigMap", place, {"data": data})
        config_map["metadata"]["labels"][DASHBOARD_LABEL] = "1"
        found.append(config_map)
    return found


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
