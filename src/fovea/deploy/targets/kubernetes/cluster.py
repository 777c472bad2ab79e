"""The namespace, accounts of pods, priorities, and Redis."""

from __future__ import annotations

from fovea.deploy.spec import DeploySpec, Redis
from fovea.deploy.targets.kubernetes import pods
from fovea.deploy.targets.kubernetes.objects import (
    SECRETS,
    Manifest,
    cluster_manifest,
    labels,
    manifest,
    part_name,
    selector,
)

REDIS_IMAGE = "redis:7.4.2-alpine"
REDIS_PORT = 6379


def secrets(spec: DeploySpec) -> list[str]:
    """Names of the Secrets that have to exist before the deployment."""
    parts = ["engine-key"]
    if spec.gateway is not None:
        parts.append("keys")
    if spec.redis is not None:
        parts.append("redis")
    return [part_name(spec, part) for part in parts]


def namespace(spec: DeploySpec) -> Manifest:
    """The namespace. It accepts only pods that keep to the restricted Pod Security Standard."""
    modes = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    found = cluster_manifest(spec, "v1 Namespace", spec.effective_namespace, {})
    found["metadata"]["labels"] |= modes
    found["metadata"]["annotations"] = {SECRETS: ",".join(secrets(spec))}
    return found


def accounts(spec: DeploySpec) -> list[Manifest]:
    """A service account for each component. None of them brings a token by itself."""
    components = ["engine"]
    if spec.gateway is not None:
        components.append("gateway")
    if spec.redis is not None:
        components.append("redis")
    return [
        manifest(
            spec,
            "v1 ServiceAccount",
            part_name(spec, component),
            {"automountServiceAccountToken": False},
            component,
        )
        for component in components
    ]


def priorities(spec: DeploySpec) -> list[Manifest]:
    """Priority classes: serving pods may displace others, pods of spot pools may not."""
    classes = [("serving", 100_000, "PreemptLowerPriority", "Engines on demand, gateways and Redis.")]
    if any(pool.spot for pool in spec.pools):
        classes.append(("spot", 10_000, "Never", "Engines on spot machines."))
    return [
        cluster_manifest(
            spec,
            "scheduling.k8s.io/v1 PriorityClass",
            part_name(spec, name),
            {"value": value, "preemptionPolicy": policy, "globalDefault": False, "description": text},
        )
        for name, value, policy, text in classes
    ]


def redis(spec: DeploySpec, settings: Redis) -> list[Manifest]:
    """Redis for answers and accounts, in memory. After a restart gateways restore the accounts.

    It evicts nothing, or else an account could be lost for an answer: see `machine.sharing_values`.
    """
    name, found = part_name(spec, "redis"), selector(spec, "redis")
    command = [
        "redis-server", "--port", str(REDIS_PORT), "--save", "", "--appendonly", "no",
        "--maxmemory", f"{settings.memory_mib}mb", "--maxmemory-policy", "noeviction",
        "--requirepass", "$(REDIS_PASSWORD)",
    ]  # fmt: skip
    probe = {"tcpSocket": {"port": "redis"}, "periodSeconds": 5, "timeoutSeconds": 3, "failureThreshold": 3}
    container = {
        "name": "redis",
        "image": REDIS_IMAGE,
        "command": command,
        "env": [pods.secret_env("REDIS_PASSWORD", name, "password")],
        "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
        "startupProbe": {**probe, "failureThreshold": 12},
        "livenessProbe": probe,
        "readinessProbe": probe,
        # Redis needs room beyond its data: buffers of clients, fragmentation.
        **pods.resources({"cpu": "500m", "memory": f"{settings.memory_mib * 3 // 2 + 64}Mi"}),
        "securityContext": pods.CONTAINER_SECURITY,
    }
    pod = {
        "serviceAccountName": name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "priorityClassName": part_name(spec, "serving"),
        "terminationGracePeriodSeconds": 10,
        "securityContext": pods.POD_SECURITY,
        "containers": [container],
    }
    deployment = {
        "replicas": 1,
        # Two at a time would hold different accounts.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": found},
        "template": {"metadata": {"labels": labels(spec, "redis")}, "spec": pod},
    }
    service = {
        "selector": found,
        "ports": [{"name": "redis", "port": REDIS_PORT, "targetPort": "redis"}],
    }
    return [
        manifest(spec, "apps/v1 Deployment", name, {"spec": deployment}, "redis"),
        manifest(spec, "v1 Service", name, {"spec": service}, "redis"),
    ]
