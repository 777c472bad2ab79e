"""The namespace and everything that runs in it: engines, gateways and Redis, with their accounts, priorities,
Services and disruption budgets.
"""

from __future__ import annotations

from typing import Any

from fovea.deploy import tracing
from fovea.deploy.spec import DeploySpec, Gateway, Pool, Redis
from fovea.deploy.targets.kubernetes import pods
from fovea.deploy.targets.kubernetes.objects import (
    PORT,
    SECRETS,
    SERVICE_PORT,
    Manifest,
    cluster_manifest,
    ends_tls,
    front_component,
    labels,
    manifest,
    part_name,
    pool_name,
    selector,
    service_port,
)

REDIS_PORT, REDIS_DATA = 6379, "/data"
DOWNLOADER = "weights"
"""Component of the pods that download weights."""
DOWNLOAD = """import pathlib, sys
from fovea.engine.load import resolve
model, revision, folder = sys.argv[1:]
resolve(model, revision)
pathlib.Path(folder, "complete").touch()
"""
"""Fills a volume of weights. A second run finds what is there, and only downloads what is missing."""


def secrets(spec: DeploySpec) -> list[str]:
    """Names of the Secrets that have to exist before the deployment."""
    parts = ["engine-key"]
    if spec.gateway is not None:
        parts.append("keys")
    if spec.gateway is not None and spec.monitoring is not None:
        parts.append("metrics")
    if spec.redis is not None:
        parts.append("redis")
    if ends_tls(spec, front_component(spec)) and not spec.kubernetes.issuer:
        parts.append("tls")
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
    if any(pool.weights_gib for pool in spec.pools):
        components.append(DOWNLOADER)
    components += tracing.parts(spec)
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
    """Redis for answers and accounts. Without a disk, gateways restore the accounts after a restart.

    It evicts nothing, or else an account could be lost for an answer: see `machine.sharing_values`.
    """
    name, found, disk = part_name(spec, "redis"), selector(spec, "redis"), bool(settings.disk_gib)
    command = [
        "redis-server", "--port", str(REDIS_PORT), "--save", "", "--appendonly", "yes" if disk else "no",
        "--maxmemory", f"{settings.memory_mib}mb", "--maxmemory-policy", "noeviction",
        "--requirepass", "$(REDIS_PASSWORD)", *(["--dir", REDIS_DATA] if disk else []),
    ]  # fmt: skip
    probe = {"tcpSocket": {"port": "redis"}, "periodSeconds": 5, "timeoutSeconds": 3, "failureThreshold": 3}
    container = {
        "name": "redis",
        "image": spec.images.of("redis"),
        "command": command,
        "env": [pods.secret_env("REDIS_PASSWORD", name, "password")],
        "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
        "startupProbe": {**probe, "failureThreshold": 12},
        "livenessProbe": probe,
        "readinessProbe": probe,
        # Redis needs room beyond its data: buffers, fragmentation, and a copy while it writes its file.
        **pods.resources(
            {"cpu": "500m", "memory": f"{settings.memory_mib * (4 if disk else 3) // 2 + 64}Mi"}
        ),
        **({"volumeMounts": [{"name": "data", "mountPath": REDIS_DATA}]} if disk else {}),
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
        **({"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": name}}]} if disk else {}),
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
        *([_claim(spec, name, settings.disk_gib, "ReadWriteOnce", "redis")] if disk else []),
    ]


def _claim(
    spec: DeploySpec, name: str, gib: int, access: str, component: str, pool: Pool | None = None
) -> Manifest:
    """A claim of a volume."""
    storage = {"storageClassName": spec.kubernetes.storage_class} if spec.kubernetes.storage_class else {}
    body = {"accessModes": [access], **storage, "resources": {"requests": {"storage": f"{gib}Gi"}}}
    return manifest(spec, "v1 PersistentVolumeClaim", name, {"spec": body}, component, pool)


def weights(spec: DeploySpec, pool: Pool) -> list[Manifest]:
    """The volume of a pool's weights, and the Job that fills it once; nothing if each engine downloads them.

    A Job cannot be changed, so one of another model has another name.
    """
    if not pool.weights_gib:
        return []
    name, folder = f"{pool_name(spec, pool)}-weights", f"{pods.WEIGHTS}/{pods.weights_key(pool)}"
    revision = str(pool.settings.get("revision", ""))
    container = {
        "name": DOWNLOADER,
        "image": spec.image,
        "command": ["python", "-c", DOWNLOAD, pool.model, revision, folder],
        "env": [
            {"name": "HOME", "value": pods.CACHE},
            {"name": "HF_HOME", "value": folder},
            pods.secret_env("HF_TOKEN", part_name(spec, "hub"), "token", optional=True),
        ],
        **pods.resources({"cpu": "1", "memory": "2Gi"}),
        "volumeMounts": [{"name": "weights", "mountPath": pods.WEIGHTS}, *pods.scratch_mounts()],
        "securityContext": pods.CONTAINER_SECURITY,
    }
    pod = {
        "serviceAccountName": part_name(spec, DOWNLOADER),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "OnFailure",
        "priorityClassName": part_name(spec, "serving"),
        "securityContext": pods.POD_SECURITY,
        "initContainers": [pods.scratch_init(spec.image)],
        "containers": [container],
        "volumes": [
            {"name": "weights", "persistentVolumeClaim": {"claimName": name}},
            pods.scratch_volume(1),
        ],
    }
    template = {"metadata": {"labels": labels(spec, DOWNLOADER, pool)}, "spec": pod}
    job = {"backoffLimit": 10, "template": template}
    return [
        _claim(spec, name, pool.weights_gib, spec.kubernetes.weights_access, DOWNLOADER, pool),
        manifest(spec, "batch/v1 Job", f"{name}-{pods.weights_key(pool)}", {"spec": job}, DOWNLOADER, pool),
    ]


def certificate(spec: DeploySpec, namespace: str = "") -> list[Manifest]:
    """The Certificate from which cert-manager makes the Secret of TLS; nothing without an issuer.

    namespace: of whoever reads the Secret; "": that of the deployment.
    """
    if not spec.tls or not spec.kubernetes.issuer:
        return []
    name = part_name(spec, "tls")
    body = {
        "secretName": name,
        "dnsNames": [spec.host],
        "issuerRef": {
            "name": spec.kubernetes.issuer,
            "kind": spec.kubernetes.issuer_kind,
            "group": "cert-manager.io",
        },
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
    }
    found = manifest(spec, "cert-manager.io/v1 Certificate", name, {"spec": body})
    if namespace:
        found["metadata"]["namespace"] = namespace
    return [found]


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
        *weights(spec, pool),
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
    component = front_component(spec)
    port = _port(service_port(spec), tls=ends_tls(spec, component))
    body = {"selector": selector(spec, component), "ports": [port]}
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


def _port(number: int, *, tls: bool = False) -> dict[str, Any]:
    protocol = "https" if tls else SERVICE_PORT
    return {"name": protocol, "port": number, "targetPort": PORT, "appProtocol": protocol}


def _gateway_pod(spec: DeploySpec, gateway: Gateway, found: dict[str, str]) -> dict[str, Any]:
    tls = ends_tls(spec, "gateway")
    container = {
        "name": "gateway",
        "image": spec.image,
        "command": ["fovea", "gateway", "--config", f"{pods.CONFIG}/gateway.toml"],
        "env": [
            {"name": "HOME", "value": pods.CACHE},
            *_redis_env(spec),
        ],
        "ports": [{"name": PORT, "containerPort": spec.gateway_port}],
        # Its readiness is that of the engines. It must not be restarted because they still load.
        **pods.probes("/health", GATEWAY_STARTUP_S, spec.gateway_port, tls=tls),
        **pods.lifecycle(spec.stop),
        **pods.resources({"cpu": str(gateway.cpus), "memory": f"{gateway.memory_gib}Gi"}),
        "volumeMounts": [
            {"name": "config", "mountPath": pods.CONFIG, "readOnly": True},
            {"name": "engine-key", "mountPath": pods.ENGINE_KEY, "readOnly": True},
            {"name": "keys", "mountPath": pods.KEYS, "readOnly": True},
            *pods.tls_mounts(spec, "gateway"),
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
            pods.secret_volume("engine-key", part_name(spec, "engine-key")),
            pods.secret_volume("keys", part_name(spec, "keys")),
            *pods.tls_volumes(spec, "gateway"),
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
