"""The fields of custom resources that the renderers use.

A cluster checks custom resources by the schemas of their operators. These are not installed here, so the
tables below stand for them. For each kind they list its API version, its fields, and which are needed. A
field that is not listed is taken for a misspelt one. Pods and other parts marked ANY are not looked into.

The tables were written after the reference of each API: KEDA 2.20, Istio 1.30, Gateway API 1.6 with inference
extension 1.5, KServe 0.20, LeaderWorkerSet 0.10, prometheus-operator 0.93.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fovea.deploy.lint.objects import Cluster

ANY = object()
TEXT, NUMBER, FLAG, TEXTS = str, int, bool, [str]
DURATION = re.compile(r"([0-9]{1,5}(h|m|s|ms)){1,4}")
Shape = Any
"""A type, a list of one shape, a table of shapes, a pattern, or ANY. A key with "!" is needed."""

_POLICIES = {"selectPolicy": TEXT, "stabilizationWindowSeconds": NUMBER, "policies": [ANY]}
_BEHAVIOR = {"scaleUp": _POLICIES, "scaleDown": _POLICIES}
_LABELS = {"matchLabels": ANY, "matchExpressions": [ANY]}
_ISTIO_TO = {"host!": TEXT, "subset": TEXT, "port": {"number!": NUMBER}}
_PARENT = {"name!": TEXT, "sectionName": TEXT, "namespace": TEXT, "group": TEXT, "kind": TEXT}
_EXTERNAL = {
    "metric!": {"backend!": TEXT, "serverAddress": TEXT, "query": TEXT},
    "target!": {"type!": TEXT, "value": TEXT, "averageValue": TEXT},
}
_PREDICTOR = {
    "minReplicas": NUMBER, "maxReplicas": NUMBER, "timeout": NUMBER, "labels": ANY, "deploymentStrategy": ANY,
    "scaleMetric": TEXT, "scaleTarget": NUMBER, "canaryTrafficPercent": NUMBER,
    "model!": {"modelFormat!": {"name!": TEXT, "version": TEXT}, "runtime": TEXT},
    "autoScaling": {"metrics": [{"type!": TEXT, "external": _EXTERNAL}], "behavior": _BEHAVIOR},
    "serviceAccountName": TEXT, "automountServiceAccountToken": FLAG, "enableServiceLinks": FLAG,
    "priorityClassName": TEXT, "terminationGracePeriodSeconds": NUMBER, "securityContext": ANY,
    "affinity": ANY, "tolerations": [ANY], "topologySpreadConstraints": [ANY], "initContainers": [ANY],
}  # fmt: skip
SPECS: Mapping[str, Shape] = {
    "keda.sh/v1alpha1 ScaledObject": {
        "scaleTargetRef!": {"apiVersion": TEXT, "kind": TEXT, "name!": TEXT},
        "minReplicaCount": NUMBER,
        "maxReplicaCount": NUMBER,
        "pollingInterval": NUMBER,
        "fallback": {"failureThreshold!": NUMBER, "replicas!": NUMBER},
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _BEHAVIOR}},
        "triggers!": [
            {
                "type!": TEXT,
                "metricType": TEXT,
                "metadata!": {
                    "serverAddress!": TEXT,
                    "query!": TEXT,
                    "threshold!": TEXT,
                    "ignoreNullValues": TEXT,
                },
            }
        ],
    },
    "networking.istio.io/v1 Gateway": {
        "selector": ANY,
        "servers": [
            {
                "hosts!": TEXTS,
                "port!": {"number!": NUMBER, "name!": TEXT, "protocol!": TEXT},
                "tls": {"mode": TEXT, "credentialName": TEXT},
            }
        ],
    },
    "networking.istio.io/v1 VirtualService": {
        "hosts": TEXTS,
        "gateways": TEXTS,
        "http": [
            {
                "name": TEXT,
                "match": [{"headers": ANY}],
                "route": [{"destination!": _ISTIO_TO, "weight": NUMBER}],
                "timeout": DURATION,
                "retries": {"attempts": NUMBER, "retryOn": TEXT},
            }
        ],
    },
    "networking.istio.io/v1 DestinationRule": {
        "host!": TEXT,
        "subsets": [{"name!": TEXT, "labels": ANY}],
        "trafficPolicy": {
            "loadBalancer": {"simple": TEXT},
            "connectionPool": {
                "tcp": {"connectTimeout": DURATION},
                "http": {"h2UpgradePolicy": TEXT, "idleTimeout": DURATION},
            },
            "outlierDetection": {
                "consecutiveGatewayErrors": NUMBER,
                "consecutive5xxErrors": NUMBER,
                "interval": DURATION,
                "baseEjectionTime": DURATION,
                "maxEjectionPercent": NUMBER,
            },
        },
    },
    "gateway.networking.k8s.io/v1 Gateway": {
        "gatewayClassName!": TEXT,
        "listeners!": [
            {
                "name!": TEXT,
                "hostname": TEXT,
                "port!": NUMBER,
                "protocol!": TEXT,
                "tls": {"mode": TEXT, "certificateRefs": [{"kind": TEXT, "name!": TEXT}]},
                "allowedRoutes": {"namespaces": {"from": TEXT}},
            }
        ],
    },
    "gateway.networking.k8s.io/v1 HTTPRoute": {
        "parentRefs": [_PARENT],
        "hostnames": TEXTS,
        "rules": [
            {
                "matches": [
                    {
                        "path": {"type": TEXT, "value": TEXT},
                        "headers": [{"type": TEXT, "name!": TEXT, "value!": TEXT}],
                    }
                ],
                "backendRefs": [{"group": TEXT, "kind": TEXT, "name!": TEXT, "port": NUMBER}],
                "timeouts": {"request": DURATION, "backendRequest": DURATION},
            }
        ],
    },
    "inference.networking.k8s.io/v1 InferencePool": {
        "selector!": {"matchLabels!": ANY},
        "targetPorts!": [{"number!": NUMBER}],
        "endpointPickerRef!": {
            "kind": TEXT,
            "name!": TEXT,
            "port": {"number!": NUMBER},
            "failureMode": TEXT,
        },
    },
    "inference.networking.x-k8s.io/v1alpha2 InferenceObjective": {
        "poolRef!": {"group": TEXT, "kind": TEXT, "name!": TEXT},
        "priority": NUMBER,
    },
    "serving.kserve.io/v1alpha1 ServingRuntime": {
        "supportedModelFormats": [{"name!": TEXT, "version": TEXT, "autoSelect": FLAG}],
        "containers!": [ANY],
        "volumes": [ANY],
    },
    "serving.kserve.io/v1beta1 InferenceService": {"predictor!": _PREDICTOR},
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": {
        "replicas": NUMBER,
        "startupPolicy": TEXT,
        "rolloutStrategy": {
            "type!": TEXT,
            "rollingUpdateConfiguration": {"maxUnavailable": ANY, "maxSurge": ANY},
        },
        "leaderWorkerTemplate!": {"size": NUMBER, "restartPolicy": TEXT, "workerTemplate!": ANY},
    },
    "monitoring.coreos.com/v1 PodMonitor": {
        "selector!": _LABELS,
        "podTargetLabels": TEXTS,
        "podMetricsEndpoints": [
            {
                "port": TEXT,
                "path": TEXT,
                "interval": DURATION,
                "authorization": {"type": TEXT, "credentials": {"name!": TEXT, "key!": TEXT}},
                "relabelings": [{"action": TEXT, "targetLabel": TEXT, "replacement": TEXT}],
            }
        ],
    },
    "monitoring.coreos.com/v1 PrometheusRule": {
        "groups": [
            {
                "name!": TEXT,
                "interval": DURATION,
                "rules": [
                    {
                        "alert": TEXT,
                        "record": TEXT,
                        "expr!": TEXT,
                        "for": DURATION,
                        "labels": ANY,
                        "annotations": ANY,
                    }
                ],
            }
        ]
    },
}
"""The specification of each kind."""
GROUPS = {name.partition("/")[0] for name in SPECS}


def check(cluster: Cluster) -> Iterator[str]:
    """Yield a sentence for every field that is unknown, missing, or of another type."""
    for each in cluster.objects:
        if each.api.partition("/")[0] not in GROUPS:
            continue
        shape = SPECS.get(f"{each.api} {each.kind}")
        if shape is None:
            yield f"{each}: {each.api} {each.kind} is not known; accepted: {', '.join(sorted(SPECS))}"
        else:
            yield from (f"{each}: {text}" for text in _faults("spec", each.spec, shape))


def _faults(where: str, value: Any, shape: Shape) -> Iterator[str]:
    if shape is ANY:
        return
    if isinstance(shape, Mapping):
        yield from _table(where, value, shape)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{where} is {value!r}; accepted: a list"
            return
        for number, entry in enumerate(value):
            yield from _faults(f"{where}[{number}]", entry, shape[0])
    else:
        yield from _simple(where, value, shape)


def _table(where: str, value: Any, shape: Mapping[str, Shape]) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{where} is {value!r}; accepted: a table"
        return
    known = {key.rstrip("!"): inner for key, inner in shape.items()}
    for key, entry in value.items():
        if key not in known:
            yield f"{where} has an unknown field {key!r}; accepted: {', '.join(sorted(known))}"
        else:
            yield from _faults(f"{where}.{key}", entry, known[key])
    for key in shape:
        if key.endswith("!") and key[:-1] not in value:
            yield f"{where} lacks {key[:-1]}"


def _simple(where: str, value: Any, shape: Shape) -> Iterator[str]:
    if isinstance(shape, re.Pattern):
        if not isinstance(value, str) or not shape.fullmatch(value):
            yield f"{where} is {value!r}; accepted: a duration, such as 30s"
    elif not isinstance(value, shape) or (shape is int and isinstance(value, bool)):
        names = {str: "a text", int: "a whole number", bool: "true or false"}
        yield f"{where} is {value!r}; accepted: {names[shape]}"
