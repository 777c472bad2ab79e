"""Autoscaling of pools: by the HorizontalPodAutoscaler with custom metrics, or by KEDA.

A pool grows by what waits, never by CPU or GPU utilisation: a GPU that computes one answer is as busy as one
that computes thirty.
"""

from __future__ import annotations

from typing import Any

from fovea.core.errors import ConfigError
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.targets.kubernetes.objects import POOL_LABEL, Manifest, manifest, pool_name

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
    return {
        "prometheus": {"url": server, "port": int(port)},
        "rules": {"default": False, "custom": rules},
    }
