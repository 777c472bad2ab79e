"""Components of the kustomization: autoscaling of pools, and monitoring by the Prometheus operator.

Pools are scaled by the HorizontalPodAutoscaler with custom metrics, or by KEDA. A pool grows by what waits,
never by CPU or GPU utilisation: a GPU that computes one answer is as busy as one that computes thirty.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from fovea.core.errors import ConfigError
from fovea.deploy.formats import yaml_text
from fovea.deploy.monitoring import files
from fovea.deploy.monitoring.targets import targets_of
from fovea.deploy.spec import DeploySpec, Monitoring, Pool
from fovea.deploy.targets.kubernetes.objects import (
    POOL_LABEL,
    PORT,
    Manifest,
    ends_tls,
    manifest,
    part_name,
    pool_name,
    selector,
)
from fovea.deploy.tracing import UI_PORT, jaeger_source

LONGEST_WINDOW_S = 3600
"""Longest stabilization window that Kubernetes accepts."""
PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
WAITING, WAITING_IMAGE = "requests_waiting", "requests_waiting_image"


def scaled(spec: DeploySpec) -> list[Pool]:
    """Return the pools with autoscaling. Raises ConfigError for a window that Kubernetes does not accept."""
    pools = [pool for pool in spec.pools if pool.max_replicas]
    if pools and spec.scale.shrink_after_s > LONGEST_WINDOW_S:
        raise ConfigError(
            f"[scale] shrink_after_s is {spec.scale.shrink_after_s}; accepted by Kubernetes: 0 to "
            f"{LONGEST_WINDOW_S}",
            param="shrink_after_s",
        )
    return pools


def metrics(spec: DeploySpec) -> dict[str, int]:
    """The metrics by which pools grow, each with its value per engine."""
    return {WAITING: spec.scale.waiting_per_replica, WAITING_IMAGE: spec.scale.waiting_image_per_replica}


def behavior(spec: DeploySpec) -> dict[str, Any]:
    """Grow at once, at most twofold in 30 seconds; shrink slowly, an engine a minute."""
    return {
        "scaleUp": {
            "stabilizationWindowSeconds": 0,
            "selectPolicy": "Max",
            "policies": [
                {"type": "Percent", "value": 100, "periodSeconds": 30},
                {"type": "Pods", "value": 2, "periodSeconds": 30},
            ],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": spec.scale.shrink_after_s,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
        },
    }


def autoscaler(spec: DeploySpec, pool: Pool, kind: tuple[str, str]) -> Manifest:
    """The HorizontalPodAutoscaler of a pool. kind: API version and kind of what it scales."""
    name = pool_name(spec, pool)
    body = {
        "scaleTargetRef": {"apiVersion": kind[0], "kind": kind[1], "name": name},
        "minReplicas": pool.replicas,
        "maxReplicas": pool.max_replicas,
        "metrics": [
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": f"fovea_{metric}"},
                    "target": {"type": "AverageValue", "averageValue": str(value)},
                },
            }
            for metric, value in metrics(spec).items()
        ],
        "behavior": behavior(spec),
    }
    return manifest(spec, "autoscaling/v2 HorizontalPodAutoscaler", name, {"spec": body}, "engine", pool)


def query(spec: DeploySpec, pool: Pool, metric: str) -> str:
    """The sum of a metric over a pool's engines, in PromQL."""
    where = f'namespace="{spec.effective_namespace}",{POOL_LABEL.replace("-", "_")}="{pool.name}"'
    return f"sum(fovea:{metric}{{{where}}})"


def scaled_object(spec: DeploySpec, pool: Pool, kind: tuple[str, str]) -> Manifest:
    """The ScaledObject of KEDA for a pool. kind: API version and kind of what it scales."""
    name = pool_name(spec, pool)
    body = {
        "scaleTargetRef": {"apiVersion": kind[0], "kind": kind[1], "name": name},
        "minReplicaCount": pool.replicas,
        "maxReplicaCount": pool.max_replicas,
        "pollingInterval": 15,
        # If Prometheus does not answer, the pool has its usual size.
        "fallback": {"failureThreshold": 4, "replicas": pool.replicas},
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior(spec)}},
        "triggers": [
            {
                "type": "prometheus",
                "metricType": "AverageValue",
                "metadata": {
                    "serverAddress": PROMETHEUS,
                    "query": query(spec, pool, metric),
                    "threshold": str(value),
                    "ignoreNullValues": "false",
                },
            }
            for metric, value in metrics(spec).items()
        ],
    }
    return manifest(spec, "keda.sh/v1alpha1 ScaledObject", name, {"spec": body}, "engine", pool)


def adapter_values(spec: DeploySpec) -> Manifest:
    """Values for the chart of prometheus-adapter, which gives the HorizontalPodAutoscaler these metrics."""
    server, _, port = PROMETHEUS.rpartition(":")
    rules = [
        {
            "seriesQuery": f'fovea:{metric}{{namespace!="",pod!=""}}',
            "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
            "name": {"as": f"fovea_{metric}"},
            "metricsQuery": "sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)",
        }
        for metric in metrics(spec)
    ]
    return {"prometheus": {"url": server, "port": int(port)}, "rules": {"default": False, "custom": rules}}


DASHBOARD_LABEL, SOURCE_LABEL = "grafana_dashboard", "grafana_datasource"
"""Labels of the ConfigMaps that the sidecar of Grafana's chart loads: dashboards, and data sources."""
JOBS = {"engine": "fovea", "gateway": "fovea-gateway"}
"""Names of the jobs by component. Rules and dashboards find the servers by them."""


def rules(spec: DeploySpec) -> Manifest:
    """The recording rules and the alerts as one object."""
    groups = [group for text in files.rules_of(spec) for group in yaml.safe_load(text)["groups"]]
    found = manifest(
        spec,
        "monitoring.coreos.com/v1 PrometheusRule",
        part_name(spec, "rules"),
        {"spec": {"groups": groups}},
    )
    found["metadata"]["annotations"] = {"fovea/alert-targets": " ".join(targets_of(spec)[1])}
    return found


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


def sources(spec: DeploySpec) -> list[Manifest]:
    """A ConfigMap with Grafana's data source of Jaeger."""
    host = f"{part_name(spec, 'jaeger')}.{spec.effective_namespace}.svc"
    text = yaml_text({"apiVersion": 1, "datasources": [jaeger_source(f"http://{host}:{UI_PORT}")]})
    found = manifest(spec, "v1 ConfigMap", part_name(spec, "jaeger-source"), {"data": {"jaeger.yaml": text}})
    found["metadata"]["labels"][SOURCE_LABEL] = "1"
    return [found]


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
        secret = {"name": part_name(spec, "metrics"), "key": "key"}
        endpoint["authorization"] = {"type": "Bearer", "credentials": secret}
    if ends_tls(spec, component):
        # Prometheus asks pods by their addresses, which no certificate has.
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    body = {
        "selector": {"matchLabels": selector(spec, component)},
        "podTargetLabels": [POOL_LABEL],
        "podMetricsEndpoints": [endpoint],
    }
    name = part_name(spec, component)
    return manifest(spec, "monitoring.coreos.com/v1 PodMonitor", name, {"spec": body}, component)
