"""The objects of a folder, as kustomize would build them, and the pods that they describe.

The reader knows what the renderers use: resources, components, generated ConfigMaps, and patches. `kubectl
kustomize` judges a kustomization itself. Here objects keep the names that they have in the files.
"""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from fovea.deploy.targets.kserve import QUEUE_PROXY_PORTS

Fields = Mapping[str, Any]
KNATIVE = "serving.kserve.io/deploymentMode"
"""Annotation of an InferenceService whose pods Knative runs, with a proxy of its own in each."""


@dataclass(frozen=True, slots=True)
class Object:
    """One object. data: all of its fields."""

    data: Fields

    @property
    def kind(self) -> str:
        """Its kind, such as Deployment."""
        return str(self.data.get("kind", ""))

    @property
    def api(self) -> str:
        """Its API version, such as apps/v1."""
        return str(self.data.get("apiVersion", ""))

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.metadata.get("name", ""))

    @property
    def metadata(self) -> Fields:
        """Its metadata."""
        return fields_of(self.data.get("metadata"))

    @property
    def spec(self) -> Fields:
        """Its specification; empty if it has none."""
        return fields_of(self.data.get("spec"))

    @property
    def annotations(self) -> Fields:
        """Its annotations."""
        return fields_of(self.metadata.get("annotations"))

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods that an object describes.

    replicas: their number, or the least one; None: it is not told.
    serves: whether they answer requests. Others have no ports and no probes.
    """

    owner: Object
    labels: Fields
    spec: Fields
    replicas: int | None
    serves: bool = True

    @property
    def containers(self) -> list[Fields]:
        """The containers that run for as long as a pod."""
        return [fields_of(each) for each in self.spec.get("containers") or []]

    @property
    def all_containers(self) -> list[Fields]:
        """All containers, those of the start included."""
        return [*(fields_of(each) for each in self.spec.get("initContainers") or []), *self.containers]

    def ports(self) -> dict[str | int, int]:
        """The numbers of all ports, by name and by number."""
        found: dict[str | int, int] = {}
        if self.owner.annotations.get(KNATIVE) == "Knative":
            found = {number: number for number in QUEUE_PROXY_PORTS}
        for container in self.containers:
            for port in container.get("ports") or []:
                found[port["containerPort"]] = port["containerPort"]
                if "name" in port:
                    found[port["name"]] = port["containerPort"]
        return found


@dataclass(frozen=True, slots=True)
class Cluster:
    """All objects that are checked together."""

    objects: tuple[Object, ...]

    def of(self, *kinds: str) -> Iterator[Object]:
        """Yield the objects of some kinds."""
        return (each for each in self.objects if each.kind in kinds)

    def names(self, kind: str) -> set[str]:
        """Return the names of all objects of a kind."""
        return {each.name for each in self.of(kind)}

    def pods(self) -> list[Pods]:
        """Return the pods of all objects that have any."""
        found = []
        for each in self.objects:
            if each.kind in ("Deployment", "StatefulSet"):
                template = fields_of(each.spec.get("template"))
                found.append(_pods(each, template, each.spec.get("replicas")))
            elif each.kind == "LeaderWorkerSet":
                group = fields_of(each.spec.get("leaderWorkerTemplate"))
                leader, worker = (fields_of(group.get(name)) for name in ("leaderTemplate", "workerTemplate"))
                replicas = each.spec.get("replicas")
                found += [_pods(each, leader or worker, replicas)]
                if leader:
                    found += [replace(_pods(each, worker, replicas), serves=False)]
            elif each.kind == "Job":
                found.append(replace(_pods(each, fields_of(each.spec.get("template")), None), serves=False))
            elif each.kind == "RayService":
                found += _of_ray(each)
            elif each.kind == "InferenceService":
                found.append(self._predictor(each))
        return found

    def _predictor(self, service: Object) -> Pods:
        """The pods of an InferenceService: what it says itself, and what its runtime says."""
        predictor = fields_of(service.spec.get("predictor"))
        name = fields_of(predictor.get("model")).get("runtime")
        runtimes = {each.name: each.spec for each in self.of("ServingRuntime")}
        spec = {**runtimes.get(str(name), {}), **predictor}
        return Pods(service, fields_of(predictor.get("labels")), spec, predictor.get("minReplicas"))


def _of_ray(service: Object) -> list[Pods]:
    """The pods of a RayService: its head and its workers. KubeRay writes their probes."""
    cluster = fields_of(service.spec.get("rayClusterConfig"))
    groups = [fields_of(each) for each in cluster.get("workerGroupSpecs") or []]
    head = _pods(service, fields_of(fields_of(cluster.get("headGroupSpec")).get("template")), 1)
    workers = [_pods(service, fields_of(each.get("template")), each.get("minReplicas")) for each in groups]
    return [replace(each, serves=False) for each in (*workers, head)]


def _pods(owner: Object, template: Fields, replicas: int | None) -> Pods:
    labels = fields_of(fields_of(template.get("metadata")).get("labels"))
    return Pods(owner, labels, fields_of(template.get("spec")), replicas)


def fields_of(value: Any) -> Fields:
    """Return a mapping as it is, and an empty one for everything else."""
    return value if isinstance(value, Mapping) else {}


def selects(selector: Any, labels: Fields) -> bool:
    """Tell whether a label selector finds an object. A selector without conditions finds everything."""
    found = fields_of(selector)
    if any(labels.get(key) != value for key, value in fields_of(found.get("matchLabels")).items()):
        return False
    return all(_holds(fields_of(each), labels) for each in found.get("matchExpressions") or [])


def _holds(expression: Fields, labels: Fields) -> bool:
    value, values = labels.get(str(expression.get("key"))), expression.get("values") or []
    return {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }.get(str(expression.get("operator")), False)


KUSTOMIZATION = "kustomization.yaml"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser of libyaml, which is ten times as fast, where PyYAML has it."""


class Unreadable(ValueError):
    """A file is missing, or is not a YAML. The message names it."""


def load_objects(files: Mapping[str, str], folder: str) -> Cluster:
    """Return the objects of a folder. Raises Unreadable."""
    return Cluster(tuple(Object(each) for each in _folder(files, folder, []) if each))


def _folder(files: Mapping[str, str], folder: str, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the objects of a folder. before: those to which a component is added."""
    path = posixpath.normpath(posixpath.join(folder, KUSTOMIZATION))
    if path not in files:
        inside = [each for each in sorted(files) if each.startswith(f"{folder.rstrip('/')}/")]
        if not inside:
            raise Unreadable(f"{folder} is named, but does not exist")
        return [
            *before,
            *(found for each in inside if each.endswith(".yaml") for found in _parse(files, each)),
        ]
    found = list(before)
    for kustomization in _parse(files, path):
        for resource in kustomization.get("resources") or []:
            place = posixpath.normpath(posixpath.join(folder, resource))
            found += _parse(files, place) if place in files else _folder(files, place, [])
        found += [_config_map(files, folder, each) for each in kustomization.get("configMapGenerator") or []]
        for component in kustomization.get("components") or []:
            found = _folder(files, posixpath.normpath(posixpath.join(folder, component)), found)
        for patch in kustomization.get("patches") or []:
            found = [_patched(each, patch) for each in found]
    return found


def _parse(files: Mapping[str, str], path: str) -> Iterator[dict[str, Any]]:
    if path not in files:
        raise Unreadable(f"{path} is named, but does not exist")
    try:
        documents = list(yaml.load_all(files[path], LOADER))
    except yaml.YAMLError as error:
        raise Unreadable(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    for document in documents:
        if document is not None and not isinstance(document, dict):
            raise Unreadable(f"{path} holds {type(document).__name__}; accepted: objects of Kubernetes")
        yield document or {}


def _config_map(files: Mapping[str, str], folder: str, generator: Mapping[str, Any]) -> dict[str, Any]:
    data = {}
    for entry in generator.get("files") or []:
        key, _, place = entry.rpartition("=")
        path = posixpath.normpath(posixpath.join(folder, place))
        if path not in files:
            raise Unreadable(f"{path} is named, but does not exist")
        data[key or posixpath.basename(place)] = files[path]
    metadata = {"name": generator.get("name"), "namespace": generator.get("namespace")}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patched(data: dict[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    target, found = fields_of(patch.get("target")), Object(data)
    labels = fields_of(found.metadata.get("labels"))
    wanted = dict(
        entry.split("=", 1) for entry in str(target.get("labelSelector", "")).split(",") if "=" in entry
    )
    if target.get("kind", found.kind) != found.kind or target.get("name", found.name) != found.name:
        return data
    if not selects({"matchLabels": wanted}, labels):
        return data
    change = yaml.safe_load(str(patch.get("patch", "")))
    if isinstance(change, list):
        changed = copy.deepcopy(data)
        for step in change:
            _apply(changed, step)
        return changed
    body = {key: value for key, value in fields_of(change).items() if key not in ("metadata", "kind")}
    merged = _merged(data, body)
    return merged if isinstance(merged, dict) else data


def _apply(data: Any, step: Mapping[str, Any]) -> None:
    """Apply one step of a JSON patch. Raises Unreadable if its path does not exist."""
    path = str(step.get("path", ""))
    *parents, last = (part.replace("~1", "/") for part in path.strip("/").split("/"))
    try:
        for part in parents:
            data = data[int(part)] if isinstance(data, list) else data[part]
        key = int(last) if isinstance(data, list) else last
        if step["op"] == "remove":
            del data[key]
        elif step["op"] == "replace" and key not in data:
            raise KeyError(key)
        else:
            data[key] = step["value"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Unreadable(f"a patch names {path!r}, which does not exist") from error


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new
