"""Parts of pods: security, probes, stop, volumes and environment, and the nodes on which they run.

Targets that run engines by other objects than Deployments use them, too. Clouds mark spot nodes in their own
ways. Terms of a node affinity are alternatives, so one manifest names the marks of all clouds, and no overlay
for each cloud is needed.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

from fovea.deploy.gpus import PRODUCTS, mig_resource
from fovea.deploy.spec import DeploySpec, Pool, Stop
from fovea.deploy.targets.kubernetes.objects import PORT, ends_tls, part_name, pool_name

SPOT = (
    ("cloud.google.com/gke-spot", "true"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
    ("karpenter.sh/capacity-type", "spot"),
)
"""Labels of spot nodes: GKE, EKS managed node groups, AKS, Karpenter."""


def gpu_resources(pool: Pool) -> dict[str, int]:
    """The GPU resources of an engine in one pod."""
    if pool.hardware != "cuda":
        return {}
    return {mig_resource(pool.mig): 1} if pool.mig else {"nvidia.com/gpu": pool.devices}


def affinity(pool: Pool) -> dict[str, Any]:
    """The affinity of a pool's pods: to the product of its GPU, and to spot or on-demand nodes."""
    product = []
    if pool.hardware == "cuda" and pool.gpu:
        values = list(PRODUCTS[pool.gpu])
        product = [{"key": "nvidia.com/gpu.product", "operator": "In", "values": values}]
    if pool.spot:
        terms = [[{"key": key, "operator": "In", "values": [value]}] for key, value in SPOT]
    else:
        terms = [[{"key": key, "operator": "NotIn", "values": [value]} for key, value in SPOT]]
    required = [{"matchExpressions": [*term, *product]} for term in terms]
    return {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": required}}
    }


def tolerations(pool: Pool) -> list[dict[str, str]]:
    """The taints of GPU and spot nodes that a pool's pods tolerate."""
    found = []
    if pool.hardware == "cuda":
        found.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if pool.spot:
        found += [
            {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in SPOT
        ]
    return found


def spread(selector: dict[str, str]) -> list[dict[str, Any]]:
    """Spread pods over zones and nodes, as far as there is room."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector},
            "matchLabelKeys": ["pod-template-hash"],
        }
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]


USER = 1000
CONFIG, CACHE, ENGINE_KEY = "/etc/fovea", "/var/cache/fovea", "/var/run/fovea/engine-key"
KEYS, TLS, WEIGHTS = "/var/run/fovea/keys", "/var/run/fovea/tls", "/var/lib/fovea/weights"
SECRET_MODE = 0o440
LOAD_S = 300
"""Seconds for an engine to load its weights from its own disk."""
DOWNLOAD_S_PER_GIB = 20
"""Seconds to download a GiB of weights: 50 MiB/s."""
STARTUP_PERIOD_S = 10
LARGEST_EMPTY_DIR_GIB = 50
"""Caches up to this size are on the node's own disk; larger ones get a volume of their own."""
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""The decoders of images need no right that this takes away: seccomp and memory files work without any."""
SMALL_RESOURCES = {"cpu": "100m", "memory": "128Mi"}


def startup_s(pool: Pool) -> int:
    """Seconds that an engine may take to start: to download as much as its disk holds, and to load it."""
    shared = pool.weights_gib or pool.weights_image
    return LOAD_S + (0 if shared else DOWNLOAD_S_PER_GIB * pool.disk_gib)


def probe(path: str, period_s: int, failures: int, port: int, *, tls: bool = False) -> dict[str, Any]:
    """A probe of a path at a container's port. With TLS, the kubelet checks no name of the certificate."""
    return {
        "httpGet": {"path": path, "port": port, **({"scheme": "HTTPS"} if tls else {})},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def probes(startup: str, seconds: int, port: int, *, tls: bool = False) -> dict[str, Any]:
    """The three probes. Liveness is about the process alone, so that an overload restarts nothing.

    startup: path that answers when the process has started.
    seconds: time that it has for that.
    """
    return {
        "startupProbe": probe(
            startup, STARTUP_PERIOD_S, math.ceil(seconds / STARTUP_PERIOD_S), port, tls=tls
        ),
        "livenessProbe": probe("/health", 10, 6, port, tls=tls),
        "readinessProbe": probe("/ready", 5, 2, port, tls=tls),
    }


def lifecycle(stop: Stop) -> dict[str, Any]:
    """A pause before SIGTERM, in which the endpoint is removed everywhere. It needs Kubernetes 1.30."""
    return {"lifecycle": {"preStop": {"sleep": {"seconds": stop.pre_stop_s}}}} if stop.pre_stop_s else {}


def resources(values: dict[str, Any]) -> dict[str, Any]:
    """Requests equal to limits: the pod gets what it needs, and is evicted last."""
    return {"resources": {"requests": dict(values), "limits": dict(values)}}


def secret_env(variable: str, secret: str, key: str, *, optional: bool = False) -> dict[str, Any]:
    """An environment variable from a Secret."""
    reference: dict[str, Any] = {"name": secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def secret_volume(name: str, secret: str) -> dict[str, Any]:
    """The volume of a Secret. It is mounted as a folder, so that changes reach the pod."""
    return {"name": name, "secret": {"secretName": secret, "defaultMode": SECRET_MODE}}


def tls_volumes(spec: DeploySpec, component: str) -> list[dict[str, Any]]:
    """The volume of the certificate, if the pods of a component end TLS."""
    return [secret_volume("tls", part_name(spec, "tls"))] if ends_tls(spec, component) else []


def tls_mounts(spec: DeploySpec, component: str) -> list[dict[str, Any]]:
    """The mount of the certificate, if the pods of a component end TLS."""
    return [{"name": "tls", "mountPath": TLS, "readOnly": True}] if ends_tls(spec, component) else []


def config_volume(config_map: str) -> dict[str, Any]:
    """The volume of a configuration file."""
    return {"name": "config", "configMap": {"name": config_map}}


def scratch_volume(gib: int) -> dict[str, Any]:
    """The volume of caches and temporary files of one pod."""
    if gib <= LARGEST_EMPTY_DIR_GIB:
        return {"name": "scratch", "emptyDir": {"sizeLimit": f"{gib}Gi"}}
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{gib}Gi"}}}
    return {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def scratch_mounts() -> list[dict[str, Any]]:
    """The folders of the volume `scratch` that a container uses."""
    return [
        {"name": "scratch", "mountPath": CACHE, "subPath": "cache"},
        {"name": "scratch", "mountPath": "/tmp", "subPath": "tmp"},
    ]


def scratch_init(image: str) -> dict[str, Any]:
    """A container that creates these folders with mode 0700.

    The root of a volume may be written by every user of the pod. Fovea loads code and cached outputs only
    from folders that no other user can change.
    """
    return {
        "name": "folders",
        "image": image,
        "command": ["mkdir", "-p", "-m", "0700", "/scratch/cache", "/scratch/tmp"],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        **resources(SMALL_RESOURCES),
        "securityContext": CONTAINER_SECURITY,
    }


def weights_key(pool: Pool) -> str:
    """Name of a model's folder in a volume of weights: another model or revision has another one."""
    revision = pool.settings.get("revision", "")
    return hashlib.sha256(f"{pool.model}@{revision}".encode()).hexdigest()[:10]


def hub_env(pool: Pool) -> list[dict[str, Any]]:
    """Variables that say where the hub's files are: in a volume that a Job has filled, or in the pod."""
    if not pool.weights_gib:
        return [{"name": "HF_HOME", "value": f"{CACHE}/hub"}]
    return [
        {"name": "HF_HOME", "value": f"{WEIGHTS}/{weights_key(pool)}"},
        {"name": "HF_HUB_OFFLINE", "value": "1"},
    ]


def weights_volumes(spec: DeploySpec, pool: Pool) -> list[dict[str, Any]]:
    """The volume of a pool's weights: a claim that a Job fills, or an image. None: pods download them."""
    if pool.weights_image:
        return [{"name": "weights", "image": {"reference": pool.weights_image, "pullPolicy": "IfNotPresent"}}]
    if not pool.weights_gib:
        return []
    claim = {"claimName": f"{pool_name(spec, pool)}-weights", "readOnly": True}
    return [{"name": "weights", "persistentVolumeClaim": claim}]


def weights_mounts(pool: Pool) -> list[dict[str, Any]]:
    """The mount of the volume of weights."""
    if not pool.weights_image and not pool.weights_gib:
        return []
    return [{"name": "weights", "mountPath": pool.model if pool.weights_image else WEIGHTS, "readOnly": True}]


def weights_init(spec: DeploySpec, pool: Pool) -> list[dict[str, Any]]:
    """A container that waits until the Job has filled the volume of weights."""
    if not pool.weights_gib:
        return []
    done = f"{WEIGHTS}/{weights_key(pool)}/complete"
    return [
        {
            "name": "weights",
            "image": spec.image_of(pool),
            "command": ["sh", "-c", f"until [ -e {done} ]; do sleep 2; done"],
            "volumeMounts": weights_mounts(pool),
            **resources(SMALL_RESOURCES),
            "securityContext": CONTAINER_SECURITY,
        }
    ]


def engine_resources(pool: Pool) -> dict[str, Any]:
    """The resources of an engine."""
    values: dict[str, Any] = {"cpu": str(pool.cpus), "memory": f"{pool.memory_gib}Gi"}
    if pool.disk_gib <= LARGEST_EMPTY_DIR_GIB:
        values["ephemeral-storage"] = f"{pool.disk_gib + 1}Gi"
    return {**values, **gpu_resources(pool)}


def engine_container(spec: DeploySpec, pool: Pool, name: str = "engine") -> dict[str, Any]:
    """The container of an engine."""
    secret, tls = part_name(spec, "engine-key"), ends_tls(spec, "engine")
    return {
        "name": name,
        "image": spec.image_of(pool),
        "command": ["fovea", "serve", "--config", f"{CONFIG}/engine.toml"],
        "env": [
            {"name": "HOME", "value": CACHE},
            *hub_env(pool),
            secret_env("FOVEA_API_KEY", secret, "key"),
            secret_env("HF_TOKEN", part_name(spec, "hub"), "token", optional=True),
        ],
        "ports": [{"name": PORT, "containerPort": spec.engine_port}],
        **probes("/ready", startup_s(pool), spec.engine_port, tls=tls),
        **lifecycle(spec.stop_of(pool)),
        **resources(engine_resources(pool)),
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG, "readOnly": True},
            *scratch_mounts(),
            *weights_mounts(pool),
            *tls_mounts(spec, "engine"),
        ],
        "securityContext": CONTAINER_SECURITY,
    }


def engine_pod(spec: DeploySpec, pool: Pool, selector: dict[str, str]) -> dict[str, Any]:
    """The specification of an engine's pod."""
    taints = tolerations(pool)
    return {
        "serviceAccountName": part_name(spec, "engine"),
        "automountServiceAccountToken": False,
        # A Service named `fovea` would give its pods a variable FOVEA_PORT, which is a setting of Fovea.
        "enableServiceLinks": False,
        "priorityClassName": part_name(spec, "spot" if pool.spot else "serving"),
        "terminationGracePeriodSeconds": spec.stop_of(pool).grace_s,
        "securityContext": POD_SECURITY,
        "affinity": affinity(pool),
        **({"tolerations": taints} if taints else {}),
        "topologySpreadConstraints": spread(selector),
        "initContainers": [scratch_init(spec.image_of(pool)), *weights_init(spec, pool)],
        "containers": [engine_container(spec, pool)],
        "volumes": [
            config_volume(f"{pool_name(spec, pool)}-config"),
            scratch_volume(pool.disk_gib),
            *weights_volumes(spec, pool),
            *tls_volumes(spec, "engine"),
        ],
    }
