"""KServe: a ServingRuntime and an InferenceService for each pool, in KServe's Standard deployment mode.

The runtime says how an engine is started, the service how many there are and how their pods end. Clients use
OpenAI's API of the service. With autoscaling KServe makes KEDA's ScaledObject itself, from the metrics here.
The overlay `knative` is for KServe's other mode: scaling by concurrency, and a canary.
"""

from __future__ import annotations

from typing import Any

from fovea.deploy.formats import yaml_text
from fovea.deploy.spec import DeploySpec, Pool, whole_number
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.kubernetes import components, pods, workloads
from fovea.deploy.targets.kubernetes.layout import OVERLAY, Layout, lint
from fovea.deploy.targets.kubernetes.objects import Manifest, labels, manifest, pool_name, selector

ROOT = "kserve"
CONTAINER = "kserve-container"
"""KServe finds the container of the model by this name."""
SERVICE_SUFFIX = "-pods"
"""KServe makes Services with the name of the InferenceService itself."""
DEFAULT_MAX_RUNNING = 64
"""Default of the setting `max_running` of `fovea serve`."""
CANARY_PERCENT = 10
QUEUE_PROXY_PORTS = (8012, 8013, 8022, 8112, 9090, 9091)
"""Ports of Knative's queue-proxy: HTTP/1, HTTP/2, its administration, TLS, and metrics."""
FORMAT = "fovea"
ANNOTATIONS = "serving.kserve.io"
VISIBILITY = ("networking.kserve.io/visibility", "networking.knative.dev/visibility")
"""Labels that keep a service within the cluster: of KServe's Standard mode, and of Knative."""


def render(spec: DeploySpec) -> Files:
    """Return all files. Raises ConfigError for names that clash, and for windows that are too long."""
    files = LAYOUT.files(spec)
    for path, text in _knative(spec).items():
        files[f"{ROOT}/overlays/knative/{path}"] = text
    return files


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the checks of the kustomization and of the overlay for Knative."""
    build = f"{ROOT}/overlays/knative"
    return (
        *LAYOUT.checks(spec),
        Check("kubernetes-validate", ("--strict", f"{{dir}}/{build}/network.yaml"), f"schemas of {build}"),
        Check("kubectl", ("kustomize", f"{{dir}}/{build}"), f"build of {build}"),
        lint(build),
    )


def _engines(spec: DeploySpec, pool: Pool) -> list[Manifest]:
    name = pool_name(spec, pool)
    runtime = manifest(
        spec,
        "serving.kserve.io/v1alpha1 ServingRuntime",
        name,
        {"spec": _runtime(spec, pool)},
        "engine",
        pool,
    )
    scaled = spec.monitoring is not None and bool(pool.max_replicas)
    annotations = {f"{ANNOTATIONS}/deploymentMode": "Standard"}
    if scaled:
        annotations[f"{ANNOTATIONS}/autoscalerClass"] = "keda"
    service = manifest(
        spec,
        "serving.kserve.io/v1beta1 InferenceService",
        name,
        {"spec": {"predictor": _predictor(spec, pool, scaled=scaled)}},
        "engine",
        pool,
        annotations,
    )
    # KServe would open all paths of the engine to everybody. Clients come through the spec's own Service.
    service["metadata"]["labels"] |= dict.fromkeys(VISIBILITY, "cluster-local")
    return [runtime, service, *workloads.around(spec, pool, SERVICE_SUFFIX)]


def _runtime(spec: DeploySpec, pool: Pool) -> dict[str, Any]:
    container = pods.engine_container(spec, pool, CONTAINER)
    return {
        "supportedModelFormats": [{"name": FORMAT, "version": "1", "autoSelect": False}],
        "containers": [container],
        "volumes": pods.engine_pod(spec, pool, {})["volumes"],
    }


def _predictor(spec: DeploySpec, pool: Pool, *, scaled: bool) -> dict[str, Any]:
    """The predictor: the number of engines, the model, and what belongs to a pod but to no container."""
    pod = pods.engine_pod(spec, pool, selector(spec, "engine", pool))
    rest = {key: value for key, value in pod.items() if key not in ("containers", "volumes")}
    predictor = {
        "minReplicas": pool.replicas,
        "maxReplicas": pool.max_replicas or pool.replicas,
        "timeout": spec.max_answer_s,
        "labels": labels(spec, "engine", pool),
        "deploymentStrategy": workloads.ROLLING,
        "model": {"modelFormat": {"name": FORMAT, "version": "1"}, "runtime": pool_name(spec, pool)},
        **rest,
    }
    if scaled:
        predictor["autoScaling"] = {
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {
                            "backend": "prometheus",
                            "serverAddress": components.PROMETHEUS,
                            "query": components.query(spec, pool, metric),
                        },
                        # KServe gives this to KEDA, which divides the sum by it: a value per engine.
                        "target": {"type": "Value", "value": str(value)},
                    },
                }
                for metric, value in components.metrics(spec).items()
            ],
            "behavior": components.behavior(spec),
        }
    return predictor


def _knative(spec: DeploySpec) -> Files:
    """The overlay for Knative, which drains pods itself and sets their grace period to `timeout`."""
    patches: list[Manifest] = []
    for pool in spec.pools:
        if spec.stop_of(pool).pre_stop_s:
            patches.append(
                {
                    "target": {"kind": "ServingRuntime", "name": pool_name(spec, pool)},
                    "patch": _json_patch([{"op": "remove", "path": "/spec/containers/0/lifecycle"}]),
                }
            )
        mode = f"{ANNOTATIONS}/deploymentMode".replace("/", "~1")
        keda = f"{ANNOTATIONS}/autoscalerClass".replace("/", "~1")
        scaled = spec.monitoring is not None and bool(pool.max_replicas)
        target = whole_number(pool.settings, "max_running", DEFAULT_MAX_RUNNING, low=1)
        patch: list[dict[str, Any]] = [
            {"op": "replace", "path": f"/metadata/annotations/{mode}", "value": "Knative"},
            {"op": "add", "path": "/spec/predictor/scaleMetric", "value": "concurrency"},
            {"op": "add", "path": "/spec/predictor/scaleTarget", "value": target},
            {"op": "add", "path": "/spec/predictor/canaryTrafficPercent", "value": CANARY_PERCENT},
            {"op": "remove", "path": "/spec/predictor/deploymentStrategy"},
            {"op": "remove", "path": "/spec/predictor/terminationGracePeriodSeconds"},
        ]
        if scaled:
            patch += [
                {"op": "remove", "path": f"/metadata/annotations/{keda}"},
                {"op": "remove", "path": "/spec/predictor/autoScaling"},
            ]
        found = {"kind": "InferenceService", "name": pool_name(spec, pool)}
        patches.append({"target": found, "patch": _json_patch(patch)})
    kustomization = {**OVERLAY, "resources": ["../../base", "network.yaml"], "patches": patches}
    return {"kustomization.yaml": yaml_text(kustomization), "network.yaml": yaml_text(_queue_proxies(spec))}


def _queue_proxies(spec: DeploySpec) -> Manifest:
    """Knative puts a proxy into each pod. Requests, probes and scrapes of Knative come through its ports."""
    body = {
        "podSelector": {"matchLabels": selector(spec, "engine")},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"protocol": "TCP", "port": port} for port in QUEUE_PROXY_PORTS]}],
    }
    return manifest(spec, "networking.k8s.io/v1 NetworkPolicy", f"{spec.name}-queue-proxies", {"spec": body})


def _json_patch(entries: list[dict[str, Any]]) -> str:
    """Return a JSON patch as YAML."""
    return "".join(
        f"- {line}" if not number else f"  {line}"
        for entry in entries
        for number, line in enumerate(yaml_text(entry).splitlines(keepends=True))
    )


LAYOUT = Layout(
    ROOT,
    _engines,
    custom=True,
    scaled_kind=None,
    engine_tls=False,
    service_suffix=SERVICE_SUFFIX,
    references=(("ServingRuntime", "spec/volumes/configMap/name"),),
)
