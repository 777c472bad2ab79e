"""LeaderWorkerSet: a group of pods for each engine, one pod for each of its devices.

The first pod of a group, the leader, is the engine: it serves, and its pods are those of the pool's Service.
The others are its workers (`engine.parallel`): they run the same command, which finds its place in the group
by the variables that LeaderWorkerSet sets, and they have no HTTP port, so no probes. When a pod of a group
ends, the whole group is started again. An engine on one device is a group of its leader alone.
"""

from __future__ import annotations

from typing import Any

from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.kubernetes import pods, workloads
from fovea.deploy.targets.kubernetes.layout import Layout
from fovea.deploy.targets.kubernetes.objects import Manifest, labels, manifest, pool_name, selector

API, KIND = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
VOLUME_NAMES = "spec/leaderWorkerTemplate/workerTemplate/spec/volumes/configMap/name"
LEADER_VOLUME_NAMES = "spec/leaderWorkerTemplate/leaderTemplate/spec/volumes/configMap/name"
WORKER = "worker"
"""Component of the pods that are no leaders. Services select engines, so they do not find these."""
OF_HTTP = ("ports", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle")


def render(spec: DeploySpec) -> Files:
    """Return all files."""
    return LAYOUT.files(spec)


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the checks of the kustomization."""
    return LAYOUT.checks(spec)


def _engines(spec: DeploySpec, pool: Pool) -> list[Manifest]:
    pod = pods.engine_pod(spec, pool, selector(spec, "engine", pool))
    for constraint in pod["topologySpreadConstraints"]:
        del constraint["matchLabelKeys"]  # only Deployments set pod-template-hash
    group: dict[str, Any] = {"size": pool.devices, "restartPolicy": "RecreateGroupOnPodRestart"}
    template = {"metadata": {"labels": labels(spec, "engine", pool)}, "spec": pod}
    if pool.devices > 1:
        if pool.hardware == "cuda":
            one = pods.resources({**pods.engine_resources(pool), "nvidia.com/gpu": 1})
            pod["containers"][0] |= one
        group["leaderTemplate"] = template
        template = {"metadata": {"labels": labels(spec, WORKER, pool)}, "spec": _worker(pod)}
    group["workerTemplate"] = template
    replicas = {} if pool.max_replicas else {"replicas": pool.replicas}
    body = {
        **replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 0, "maxSurge": 1},
        },
        "leaderWorkerTemplate": group,
    }
    name = pool_name(spec, pool)
    return [
        manifest(spec, f"{API} {KIND}", name, {"spec": body}, "engine", pool),
        *workloads.around(spec, pool),
    ]


def _worker(pod: dict[str, Any]) -> dict[str, Any]:
    """The pod of a worker: that of its leader without HTTP."""
    container = {key: value for key, value in pod["containers"][0].items() if key not in OF_HTTP}
    return {**pod, "containers": [{**container, "name": WORKER}]}


LAYOUT = Layout(
    "leaderworkerset",
    _engines,
    custom=True,
    scaled_kind=(API, KIND),
    references=((KIND, VOLUME_NAMES), (KIND, LEADER_VOLUME_NAMES)),
    groups=True,
)
