"""KubeRay: a RayService for each pool, which is a cluster of Ray with the pool's engines on it.

Each engine has a worker pod of its own, and HAProxy runs in each of these pods, too. The head has no engine
and gets no requests. Gateways find the worker pods by a headless Service, and write the header by which
HAProxy sends an image to the same engine each time. Without a gateway the spec's Service leads to these pods.

With `max_replicas` the engines' own signals decide their number (`cluster.scaling`), and Ray's autoscaler
brings the pods. An engine on several devices has them all in one pod.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fovea.deploy import ray_serve
from fovea.deploy.formats import yaml_text
from fovea.deploy.machine import LOOPBACK
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.kubernetes import pods, workloads
from fovea.deploy.targets.kubernetes.layout import Layout
from fovea.deploy.targets.kubernetes.objects import (
    PORT,
    TRUSTED,
    Manifest,
    labels,
    manifest,
    part_name,
    pool_name,
    selector,
)
from fovea.deploy.targets.leaderworkerset import OF_HTTP, WORKER
from fovea.deploy.tracing import trace_values

API, KIND = "ray.io/v1", "RayService"
RAY_VERSION = "2.60.0"
"""The version of Ray in the image: of the extra `cluster`."""
HEAD_CPUS, HEAD_GIB = 2, 4
HEAD_LABEL = WORKER
"""Component of the head. Services select engines, so they do not find it."""
CONTAINER = "ray-worker"
BALANCE, RETRY_KIB, DEREGISTER_S = 2.0, 256, 10
"""Defaults of `[ingress]` in docs/cluster.md."""
ENGINE_SHARE = 0.5
"""Share of a pod's memory that its engine asks Ray for. Ray gives away what its object store, up to 30%, and
its own processes leave."""
OF_FILE = ("host", "port", "lame_duck_s", "server_names")
"""Settings of an engine behind a relay of its own pod that are those of `cluster.ray.replica`."""


def render(spec: DeploySpec) -> Files:
    """Return all files."""
    return LAYOUT.files(spec)


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the checks of the kustomization."""
    return LAYOUT.checks(spec)


def _engines(spec: DeploySpec, pool: Pool) -> list[Manifest]:
    name = pool_name(spec, pool)
    config = {
        "serveConfigV2": yaml_text(_serve_config(spec, pool)),
        "excludeHeadPodFromServeSvc": True,
        "rayClusterConfig": {
            "rayVersion": RAY_VERSION,
            "enableInTreeAutoscaling": bool(pool.max_replicas),
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                "template": {
                    "metadata": {"labels": labels(spec, HEAD_LABEL, pool)},
                    "spec": _head(spec, pool),
                },
            },
            "workerGroupSpecs": [
                {
                    "groupName": "engines",
                    "replicas": pool.replicas,
                    "minReplicas": pool.replicas,
                    "maxReplicas": max(pool.replicas, pool.max_replicas),
                    "rayStartParams": {"num-cpus": str(pool.cpus), **_gpus(pool)},
                    "template": {
                        "metadata": {"labels": labels(spec, "engine", pool)},
                        "spec": _worker(spec, pool),
                    },
                }
            ],
        },
    }
    service = manifest(spec, f"{API} {KIND}", name, {"spec": config}, "engine", pool)
    return [service, *workloads.around(spec, pool)]


def _gpus(pool: Pool) -> dict[str, str]:
    """Return how many GPUs Ray has to know. KubeRay would not count slices of one."""
    return {"num-gpus": str(pool.devices)} if pool.hardware == "cuda" else {}


def _serve_config(spec: DeploySpec, pool: Pool) -> dict[str, Any]:
    """Return the configuration of Ray Serve: one application, as `fovea cluster up` would make it."""
    drain_s = float(spec.stop_of(pool).drain_s)
    own = {key: value for key, value in spec.engine_settings(pool).items() if key not in OF_FILE}
    traces = trace_values(spec, part_name(spec, "collector"))
    proxies = [LOOPBACK, *(spec.trusted_proxies or TRUSTED)]  # HAProxy of the pod, and gateways
    shared = {"open_metrics": True, "trusted_proxies": proxies, **traces}
    settings = {**shared, **own, "lame_duck_s": 0.0}
    target_ms = settings.get("target_ttft_ms", 0)
    plan = {
        "application": pool.name,
        "role": "all",
        "settings": {key: list(each) if isinstance(each, tuple) else each for key, each in settings.items()},
        "answers": True,
        "drain_s": drain_s,
        "target_s": target_ms / 1000 if isinstance(target_ms, int) else 0.0,
    }
    bundle: dict[str, float] = {
        ray_serve.CPU: pool.cpus,
        ray_serve.MEMORY: int(pool.memory_gib * ENGINE_SHARE * (1 << 30)),
    }
    if pool.hardware == "cuda":
        bundle[ray_serve.GPU] = pool.devices
    # Each pod has room for one engine, so an update cannot start a new one before it stops an old one.
    deployment = ray_serve.deployment(
        "all", [bundle], drain_s=drain_s, deregister_s=float(DEREGISTER_S), surge=False
    )
    scale = {
        "replicas_min": pool.replicas,
        "replicas_max": pool.max_replicas,
        "scale_down_s": float(spec.scale.shrink_after_s),
    }
    deployment |= ray_serve.replicas(pool.replicas, max(pool.replicas, pool.max_replicas), scale)
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": spec.engine_port},
        "applications": [
            # The containers have the environment, so that Ray Serve has it before any application.
            ray_serve.application(pool.name, "/", [plan], [deployment], {})
        ],
    }


def _variables(spec: DeploySpec, pool: Pool) -> dict[str, str]:
    return ray_serve.environment(
        haproxy=True,
        balance=BALANCE,
        retry_kib=RETRY_KIB,
        deregister_s=float(DEREGISTER_S),
        drain_s=float(spec.stop_of(pool).drain_s),
    )


def _container(spec: DeploySpec, pool: Pool) -> dict[str, Any]:
    """Return a container of Ray. KubeRay writes its command, its ports and its probes."""
    whole = pods.engine_container(spec, pool, CONTAINER)
    container = {key: value for key, value in whole.items() if key not in (*OF_HTTP, "command")}
    container["volumeMounts"] = [*pods.scratch_mounts(), *pods.weights_mounts(pool)]
    variables = [{"name": name, "value": value} for name, value in _variables(spec, pool).items()]
    return {**container, "env": [*container["env"], *variables]}


def _worker(spec: DeploySpec, pool: Pool) -> dict[str, Any]:
    pod = pods.engine_pod(spec, pool, selector(spec, "engine", pool))
    for constraint in pod["topologySpreadConstraints"]:
        del constraint["matchLabelKeys"]  # only Deployments set pod-template-hash
    container = {**_container(spec, pool), "ports": [{"name": PORT, "containerPort": spec.engine_port}]}
    volumes = [pods.scratch_volume(pool.disk_gib), *pods.weights_volumes(spec, pool)]
    return {**pod, "containers": [container], "volumes": volumes}


def _head(spec: DeploySpec, pool: Pool) -> dict[str, Any]:
    """Return the pod of the head: Ray's control, Ray Serve's controller, and no engine, so no weights."""
    worker = _worker(spec, replace(pool, weights_gib=0, weights_image=""))
    gone = ("affinity", "tolerations", "topologySpreadConstraints", "terminationGracePeriodSeconds")
    pod = {key: value for key, value in worker.items() if key not in gone}
    if pool.max_replicas:  # Ray's autoscaler asks the API server; KubeRay gives it an account of its own
        del pod["serviceAccountName"], pod["automountServiceAccountToken"]
    (container,) = worker["containers"]
    small = pods.resources({"cpu": str(HEAD_CPUS), "memory": f"{HEAD_GIB}Gi"})
    kept = {key: value for key, value in container.items() if key != "ports"}
    return {**pod, "containers": [{**kept, "name": "ray-head", **small}]}


LAYOUT = Layout(
    "rayservice",
    _engines,
    custom=True,
    scaled_kind=None,
    groups=True,
    engine_files=False,
    engine_tls=False,
)
