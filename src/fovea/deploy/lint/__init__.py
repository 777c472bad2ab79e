"""Checks of rendered manifests that schemas cannot make: whether objects fit together.

    python -m fovea.deploy.lint FOLDER...     # a kustomization, or a folder of manifests

    objects     the objects of a folder, as kustomize would build them, and the pods that they describe
    pods        security, probes, the time that a pod has to end, what it names, autoscalers, budgets, MIG
    network     Services, NetworkPolicies, PodMonitors, and routes
    fields      the fields of custom resources

Everything here is pure: texts go in, sentences come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import yaml

from fovea.core.errors import ConfigError
from fovea.deploy.lint.fields import check_fields
from fovea.deploy.lint.network import check_network, check_routes
from fovea.deploy.lint.objects import Cluster, Unreadable, load_objects
from fovea.deploy.lint.pods import check_gpu, check_pods, check_scale

Check = Callable[[Cluster], Iterable[str]]
CHECKS: tuple[Check, ...] = (
    check_fields, check_pods, check_network, check_scale, check_routes, check_gpu,
)  # fmt: skip


def lint(files: Mapping[str, str], *folders: str) -> list[str]:
    """Return a sentence for every fault of the objects of folders, taken together.

    files: texts by path; they hold the folders, and everything that their kustomizations name.
    """
    try:
        objects = tuple(each for folder in folders for each in load_objects(files, folder).objects)
    except Unreadable as error:
        return [str(error)]
    if not objects:
        return [f"{', '.join(folders)}: no objects are there"]
    cluster = Cluster(objects)
    faults = [text for check in (_twice, *CHECKS) for text in _run(check, cluster)]
    return list(dict.fromkeys(faults))


def _run(check: Check, cluster: Cluster) -> Iterator[str]:
    """Yield the faults that a check finds. A field that it cannot read is a fault, too, and ends it."""
    try:
        yield from check(cluster)
    except (ConfigError, ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError) as error:
        yield f"{check.__module__}: a field has a value that cannot be read: {error}"


def _twice(cluster: Cluster) -> list[str]:
    """Name the objects that exist twice."""
    seen: set[tuple[str, ...]] = set()
    found = []
    for each in cluster.objects:
        key = (each.api, each.kind, str(each.metadata.get("namespace")), each.name)
        if key in seen:
            found.append(f"{each} exists twice")
        seen.add(key)
    return found
