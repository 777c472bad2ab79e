"""Checks of autoscalers and disruption budgets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fovea.deploy.lint.objects import Cluster, Fields, Object, Pods, fields_of, selects
from fovea.observe.table import COUNTERS, GAUGES

KNOWN = {*GAUGES, *(f"{name}_total" for name in COUNTERS)}
"""Fovea's metrics that tell of a load, without their prefix."""
CUSTOM = "fovea_"
"""Prefix under which prometheus-adapter offers them, because custom metrics cannot have a colon."""
BUILT_IN = ("cpu", "memory")
_QUERIED = re.compile(r"\bfovea:([a-z_]+)")


def check(cluster: Cluster) -> Iterator[str]:
    """Yield a sentence for every fault."""
    pods = cluster.pods()
    for each in cluster.of("HorizontalPodAutoscaler"):
        yield from _target(each, pods)
        yield from _bounds(each, "minReplicas", "maxReplicas")
        for metric in each.spec.get("metrics") or []:
            yield from _metric(each, fields_of(metric))
    for each in cluster.of("ScaledObject"):
        yield from _target(each, pods)
        yield from _bounds(each, "minReplicaCount", "maxReplicaCount")
        for trigger in each.spec.get("triggers") or []:
            yield from queries(each, str(fields_of(fields_of(trigger).get("metadata")).get("query", "")))
    for each in cluster.of("InferenceService"):
        yield from _predictor(each)
    for each in cluster.of("PodDisruptionBudget"):
        yield from _budget(each, pods, cluster)


def _target(scaler: Object, pods: list[Pods]) -> Iterator[str]:
    target = fields_of(scaler.spec.get("scaleTargetRef"))
    found = [
        each.owner
        for each in pods
        if each.owner.kind == target.get("kind", "Deployment") and each.owner.name == target.get("name")
    ]
    if not found:
        yield f"{scaler}: {target.get('kind')} {target.get('name')!r} does not exist"
    elif found[0].api != target.get("apiVersion", "apps/v1"):
        yield f"{scaler}: apiVersion of its target is {target.get('apiVersion')}; it is {found[0].api}"
    elif "replicas" in found[0].spec:
        yield f"{scaler}: {found[0]} has replicas of its own, to which each `kubectl apply` would return"


def _bounds(scaler: Object, low: str, high: str) -> Iterator[str]:
    if int(scaler.spec.get(low, 1)) > int(scaler.spec.get(high, 0)):
        yield f"{scaler}: {high} is below {low}"


def _metric(scaler: Object, metric: Fields) -> Iterator[str]:
    kind = str(metric.get("type"))
    source = fields_of(metric.get(kind[:1].lower() + kind[1:]))
    if kind == "Resource" and source.get("name") not in BUILT_IN:
        yield f"{scaler}: Resource metrics are {' and '.join(BUILT_IN)}, not {source.get('name')!r}"
    if kind in ("Pods", "External", "Object"):
        name = str(fields_of(source.get("metric")).get("name"))
        if not name.startswith(CUSTOM) or name.removeprefix(CUSTOM) not in KNOWN:
            yield f"{scaler}: Fovea has no metric {name!r}; accepted: {CUSTOM}NAME of fovea:NAME"


def queries(owner: Object, text: str) -> Iterator[str]:
    """Check the metrics of a query in PromQL."""
    found = _QUERIED.findall(text)
    if not found:
        yield f"{owner}: its query {text!r} names no metric of Fovea"
    for name in found:
        if name not in KNOWN:
            yield f"{owner}: Fovea has no metric fovea:{name}"


def _predictor(service: Object) -> Iterator[str]:
    predictor = fields_of(service.spec.get("predictor"))
    if int(predictor.get("minReplicas", 1)) > int(predictor.get("maxReplicas", 0)):
        yield f"{service}: maxReplicas is below minReplicas"
    if predictor.get("scaleMetric") and "autoScaling" in predictor:
        yield f"{service}: scaleMetric is beside autoScaling; accepted: one of them"
    percent = predictor.get("canaryTrafficPercent", 0)
    if not 0 <= int(percent) <= 100:
        yield f"{service}: canaryTrafficPercent is {percent}; accepted: 0 to 100"
    for metric in fields_of(predictor.get("autoScaling")).get("metrics") or []:
        source = fields_of(fields_of(fields_of(metric).get("external")).get("metric"))
        yield from queries(service, str(source.get("query", "")))


def _budget(budget: Object, pods: list[Pods], cluster: Cluster) -> Iterator[str]:
    found = [each for each in pods if selects(budget.spec.get("selector"), each.labels)]
    if not found:
        yield f"{budget}: its selector finds no pods"
    least, most = budget.spec.get("minAvailable"), budget.spec.get("maxUnavailable")
    if most in (0, "0", "0%"):
        yield f"{budget}: maxUnavailable is 0, so no node with such a pod can be drained"
    for each in found:
        replicas = _least_replicas(each, cluster)
        if isinstance(least, int) and least >= replicas:
            yield f"{budget}: minAvailable is {least} of {replicas} pods, so no node with one can be drained"
        if least == "100%":
            yield f"{budget}: minAvailable is 100%, so no node with such a pod can be drained"


def _least_replicas(pods: Pods, cluster: Cluster) -> int:
    """The number of pods: their owner's, or the least one of its autoscaler, or 1."""
    if pods.replicas is not None:
        return int(pods.replicas)
    bounds: Mapping[str, str] = {
        "HorizontalPodAutoscaler": "minReplicas",
        "ScaledObject": "minReplicaCount",
    }
    for each in cluster.of(*bounds):
        target: Any = fields_of(each.spec.get("scaleTargetRef"))
        if target.get("name") == pods.owner.name:
            return int(each.spec.get(bounds[each.kind], 1))
    return 1
