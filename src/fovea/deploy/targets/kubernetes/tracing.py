"""The OpenTelemetry collector and Jaeger in the namespace of the deployment."""

from __future__ import annotations

from typing import Any

from fovea.deploy import tracing
from fovea.deploy.spec import DeploySpec
from fovea.deploy.tables import Tracing
from fovea.deploy.targets.kubernetes import pods
from fovea.deploy.targets.kubernetes.objects import Manifest, labels, manifest, part_name, selector

PORTS = {
    "collector": {
        "otlp-grpc": tracing.GRPC_PORT,
        "otlp-http": tracing.HTTP_PORT,
        "health": tracing.HEALTH_PORT,
    },
    "jaeger": {"otlp-grpc": tracing.GRPC_PORT, "page": tracing.UI_PORT},
}
"""Ports of the containers by name."""
HEALTH = {"collector": "health", "jaeger": "page"}
"""The port that tells whether a container works."""


def objects(spec: DeploySpec, settings: Tracing) -> list[Manifest]:
    """Return a Deployment and a Service for each of them."""
    mebibytes = {"collector": tracing.COLLECTOR_MIB, "jaeger": settings.memory_mib}
    return [each for part in tracing.parts(spec) for each in _part(spec, part, mebibytes[part])]


def _part(spec: DeploySpec, part: str, mebibytes: int) -> list[Manifest]:
    name, found, ports = part_name(spec, part), selector(spec, part), PORTS[part]
    probe = {"httpGet": {"path": "/", "port": HEALTH[part]}, "periodSeconds": 10, "timeoutSeconds": 3}
    container: dict[str, Any] = {
        "name": part,
        "image": spec.images.of(part),
        "args": [f"--config={tracing.FOLDER}/config.yaml"],
        "ports": [{"name": key, "containerPort": port} for key, port in ports.items()],
        "startupProbe": {**probe, "failureThreshold": 12},
        "livenessProbe": {**probe, "failureThreshold": 6},
        "readinessProbe": {**probe, "failureThreshold": 2},
        **pods.resources({"cpu": "500m", "memory": f"{mebibytes}Mi"}),
        "volumeMounts": [
            {"name": "config", "mountPath": tracing.FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "securityContext": pods.CONTAINER_SECURITY,
    }
    pod = {
        "serviceAccountName": name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "priorityClassName": part_name(spec, "serving"),
        "terminationGracePeriodSeconds": 30,
        "securityContext": pods.POD_SECURITY,
        "containers": [container],
        "volumes": [
            pods.config_volume(f"{name}-config"),
            {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
        ],
    }
    deployment = {
        "replicas": 1,
        # Two Jaegers at a time would each hold a part of the traces.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": found},
        "template": {"metadata": {"labels": labels(spec, part)}, "spec": pod},
    }
    listed = [
        {"name": key, "port": port, "targetPort": key} for key, port in ports.items() if key != "health"
    ]
    return [
        manifest(spec, "apps/v1 Deployment", name, {"spec": deployment}, part),
        manifest(spec, "v1 Service", name, {"spec": {"selector": found, "ports": listed}}, part),
    ]
