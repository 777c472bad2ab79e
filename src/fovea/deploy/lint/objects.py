"""One object of Kubernetes, and the pods that objects describe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    """

    owner: Object
    labels: Fields
    spec: Fields
    replicas: int | None

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
                found.append(_pods(each, fields_of(group.get("workerTemplate")), each.spec.get("replicas")))
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
