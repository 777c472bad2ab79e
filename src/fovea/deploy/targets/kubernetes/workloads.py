"""The namespace and everything that runs in it: engines, gateways and Redis, with their accounts, priorities,
Services and disruption budgets.
"""

from __future__ import annotations

from typing import Any

from fovea.deploy.spec import DeploySpec, Gateway, Pool, Redis
from fovea.deploy.targets.kubernetes import pods
from fovea.deploy.targets.kubernetes.objects import (
    PORT,
    SECRETS,
    SERVICE_PORT,
    Manifest,
    cluster_manifest,
    labels,
    manifest,
    part_name,
    pool_name,
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
    service = {"selector": found, "ports": [{"name": "redis", "port": REDIS_PORT, "targetPort": "redis"}]}
    return [
        manifest(spec, "apps/v1 Deployment", name, {"spec": deployment}, "redis"),
        manifest(spec, "v1 Service", name, {"spec": service}, "redis"),
    ]


ROLLING = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
GATEWAY_STARTUP_S = 120


def engines(spec: DeploySpec, pool: Pool) -> list[Manifest]:
    """The objects of a pool."""
    name, found = pool_name(spec, pool), selector(spec, "engine", pool)
    template = {
        "metadata": {"labels": labels(spec, "engine", pool)},
        "spec": pods.engine_pod(spec, pool, found),
    }
    # A number of replicas here would undo what the autoscaler has decided, at each `kubectl apply`.
    replicas = {} if pool.max_replicas else {"replicas": pool.replicas}
    deployment = {
        **replicas,
        "strategy": ROLLING,
        "minReadySeconds": 5,
        "progressDeadlineSeconds": pods.startup_s(pool) + 300,
        "selector": {"matchLabels": found},
        "template": template,
    }
    return [
        manifest(spec, "apps/v1 Deployment", name, {"spec": deployment}, "engine", pool),
        *around(spec, pool),
    ]


def around(spec: DeploySpec, pool: Pool, suffix: str = "") -> list[Manifest]:
    """The headless Service by which gateways find a pool's engines, and its disruption budget.

    suffix: what the Service's name has beyond the pool's.
    """
    name, found = pool_name(spec, pool), selector(spec, "engine", pool)
    headless = {"clusterIP": "None", "selector": found, "ports": [_port(spec.engine_port)]}
    return [
        manifest(spec, "v1 Service", name + suffix, {"spec": headless}, "engine", pool),
        budget(spec, name, found, "engine", pool),
    ]


def gateways(spec: DeploySpec, gateway: Gateway) -> list[Manifest]:
    """The objects of the gateways, apart from the Service in front of them."""
    name, found = part_name(spec, "gateway"), selector(spec, "gateway")
    deployment = {
        "replicas": gateway.replicas,
        "strategy": ROLLING,
        "minReadySeconds": 5,
        "selector": {"matchLabels": found},
        "template": {
            "metadata": {"labels": labels(spec, "gateway")},
            "spec": _gateway_pod(spec, gateway, found),
        },
    }
    return [
        manifest(spec, "apps/v1 Deployment", name, {"spec": deployment}, "gateway"),
        budget(spec, name, found, "gateway"),
        *_discovery_rights(spec, name),
    ]


def front(spec: DeploySpec) -> Manifest:
    """The Service that clients use: the gateways, or the engines if there is no gateway."""
    component = "gateway" if spec.gateway is not None else "engine"
    body = {"selector": selector(spec, component), "ports": [_port(spec.proxy_port)]}
    return manifest(spec, "v1 Service", spec.name, {"spec": body}, component)


def budget(
    spec: DeploySpec, name: str, found: dict[str, str], component: str, pool: Pool | None = None
) -> Manifest:
    """A disruption budget that lets nodes be drained, one pod at a time."""
    body = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": found},
    }
    return manifest(spec, "policy/v1 PodDisruptionBudget", name, {"spec": body}, component, pool)


def _port(number: int) -> dict[str, Any]:
    return {"name": SERVICE_PORT, "port": number, "targetPort": PORT, "appProtocol": "http"}


def _gateway_pod(spec: DeploySpec, gateway: Gateway, found: dict[str, str]) -> dict[str, Any]:
    keys = part_name(spec, "keys")
    container = {
        "name": "gateway",
        "image": spec.image,
        "command": ["fovea", "gateway", "--config", f"{pods.CONFIG}/gateway.toml"],
        "env": [
            {"name": "HOME", "value": pods.CACHE},
            pods.secret_env("FOVEA_API_KEY", keys, "api-key"),
            pods.secret_env("FOVEA_ADMIN_KEY", keys, "admin-key"),
            *_redis_env(spec),
            *pods.traces_env(spec),
        ],
        "ports": [{"name": PORT, "containerPort": spec.gateway_port}],
        # Its readiness is that of the engines. It must not be restarted because they still load.
        **pods.probes("/health", GATEWAY_STARTUP_S, spec.gateway_port),
        **pods.lifecycle(spec.stop),
        **pods.resources({"cpu": str(gateway.cpus), "memory": f"{gateway.memory_gib}Gi"}),
        "volumeMounts": [
            {"name": "config", "mountPath": pods.CONFIG, "readOnly": True},
            {"name": "engine-key", "mountPath": pods.ENGINE_KEY, "readOnly": True},
            *pods.scratch_mounts(),
        ],
        "securityContext": pods.CONTAINER_SECURITY,
    }
    return {
        "serviceAccountName": part_name(spec, "gateway"),
        # It reads the EndpointSlices of the pools.
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "priorityClassName": part_name(spec, "serving"),
        "terminationGracePeriodSeconds": spec.stop.grace_s,
        "securityContext": pods.POD_SECURITY,
        "topologySpreadConstraints": pods.spread(found),
        "initContainers": [pods.scratch_init(spec.image)],
        "containers": [container],
        "volumes": [
            pods.config_volume(f"{part_name(spec, 'gateway')}-config"),
            {"name": "engine-key", "secret": {"secretName": part_name(spec, "engine-key")}},
            pods.scratch_volume(1),
        ],
    }


def _redis_env(spec: DeploySpec) -> list[dict[str, Any]]:
    """Addresses of Redis. They hold the password, so they are not part of the configuration file."""
    if spec.redis is None:
        return []
    address = f"redis://:$(REDIS_PASSWORD)@{part_name(spec, 'redis')}:{REDIS_PORT}"
    return [
        pods.secret_env("REDIS_PASSWORD", part_name(spec, "redis"), "password"),
        {"name": "FOVEA_REDIS", "value": f"{address}/0"},
        {"name": "FOVEA_ACCOUNTS", "value": f"{address}/1"},
    ]


def _discovery_rights(spec: DeploySpec, name: str) -> list[Manifest]:
    """The right to list EndpointSlices of this namespace, and no other right."""
    rules = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}]
    binding = {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": spec.effective_namespace}],
    }
    api = "rbac.authorization.k8s.io/v1"
    return [
        manifest(spec, f"{api} Role", name, {"rules": rules}, "gateway"),
        manifest(spec, f"{api} RoleBinding", name, binding, "gateway"),
    ]
