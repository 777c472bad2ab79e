"""LeaderWorkerSet: a group of pods for each engine.

An engine of Fovea is one process on one GPU, so a group is its leader alone (size 1). That does what a
Deployment does, for clusters whose queues and tools expect LeaderWorkerSets. A group of several pods would
need an engine that computes on all of them, and Fovea has none.
"""

from __future__ import annotations

from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.kubernetes import pods, workloads
from fovea.deploy.targets.kubernetes.layout import Layout
from fovea.deploy.targets.kubernetes.objects import Manifest, labels, manifest, pool_name, selector

API, KIND = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
VOLUME_NAMES = "spec/leaderWorkerTemplate/workerTemplate/spec/volumes/configMap/name"


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
    replicas = {} if pool.max_replicas else {"replicas": pool.replicas}
    body = {
        **replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 0, "maxSurge": 1},
        },
        "leaderWorkerTemplate": {
            "size": 1,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "workerTemplate": {"metadata": {"labels": labels(spec, "engine", pool)}, "spec": pod},
        },
    }
    name = pool_name(spec, pool)
    return [
        manifest(spec, f"{API} {KIND}", name, {"spec": body}, "engine", pool),
        *workloads.around(spec, pool),
    ]


LAYOUT = Layout(
    "leaderworkerset", _engines, custom=True, scaled_kind=(API, KIND), references=((KIND, VOLUME_NAMES),)
)
