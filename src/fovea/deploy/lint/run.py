"""Runs all checks over the objects of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import yaml

from fovea.deploy.lint import fields, gpu, network, pods, routes, scale
from fovea.deploy.lint.objects import Cluster, Unreadable, load_objects

Check = Callable[[Cluster], Iterable[str]]
CHECKS = (fields, pods, network, scale, routes, gpu)


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
    faults = [
        text for check in (_twice, *(module.check for module in CHECKS)) for text in _run(check, cluster)
    ]
    return list(dict.fromkeys(faults))


def _run(check: Check, cluster: Cluster) -> Iterator[str]:
    """Yield the faults that a check finds. A field that it cannot read is a fault, too, and ends it."""
    try:
        yield from check(cluster)
    except (ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError) as error:
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
