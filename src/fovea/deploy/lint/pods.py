"""Checks of pods, of what scales them and keeps them running, and of the parts of GPUs that they name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from fovea.core.config_files import parse_toml
from fovea.core.errors import ConfigError
from fovea.deploy.gpus import MIG_PROFILES, mig_fits, mig_resource
from fovea.deploy.lint.objects import KNATIVE, Cluster, Fields, Object, Pods, fields_of, selects
from fovea.deploy.targets.kubernetes.objects import SECRETS
from fovea.observe.table import COUNTERS, GAUGES

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def check_pods(cluster: Cluster) -> Iterator[str]:
    """Yield a sentence for every fault."""
    for pods in cluster.pods():
        for text in (
            *_security(pods),
            *_probes(pods),
            *_names(cluster, pods),
            *_end(cluster, pods),
            *_variables(pods),
            *_resources(pods),
        ):
            yield f"{pods.owner}: {text}"


def _security(pods: Pods) -> Iterator[str]:
    own = fields_of(pods.spec.get("securityContext"))
    if own.get("runAsNonRoot") is not True or not own.get("runAsUser"):
        yield "runAsNonRoot and runAsUser are not set, so the pod may run as root"
    if fields_of(own.get("seccompProfile")).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile is not RuntimeDefault, which the restricted standard wants"
    for container in pods.all_containers:
        context = fields_of(container.get("securityContext"))
        dropped = fields_of(context.get("capabilities")).get("drop") or []
        for name, good in (
            ("allowPrivilegeEscalation: false", context.get("allowPrivilegeEscalation") is False),
            ("readOnlyRootFilesystem: true", context.get("readOnlyRootFilesystem") is True),
            ("capabilities drop ALL", "ALL" in dropped),
        ):
            if not good:
                yield f"container {container.get('name')} lacks {name}"
    for volume in pods.spec.get("volumes") or []:
        if "hostPath" in volume:
            yield f"volume {volume.get('name')} is a hostPath, which the restricted standard forbids"


def _probes(pods: Pods) -> Iterator[str]:
    ports = pods.ports()
    for container in pods.containers if pods.serves else ():
        for kind in PROBES:
            probe = fields_of(container.get(kind))
            if not probe:
                yield f"container {container.get('name')} has no {kind}"
                continue
            action = fields_of(probe.get("httpGet") or probe.get("tcpSocket"))
            if action.get("port") not in ports:
                yield f"{kind} asks port {action.get('port')!r}; ports of the pod: {_listed(ports)}"
        mounted = {mount.get("name") for mount in container.get("volumeMounts") or []}
        schemes = {fields_of(fields_of(container.get(kind)).get("httpGet")).get("scheme") for kind in PROBES}
        if "tls" in mounted and schemes != {"HTTPS"}:
            yield f"container {container.get('name')} has a certificate, and its probes do not ask with HTTPS"
        live = fields_of(fields_of(container.get("livenessProbe")).get("httpGet")).get("path")
        if live == "/ready":
            yield "livenessProbe asks /ready, so an engine that loads or drains would be restarted"


def _listed(ports: dict[str | int, int]) -> str:
    return ", ".join(map(str, ports)) or "none"


def _names(cluster: Cluster, pods: Pods) -> Iterator[str]:
    """Check that ConfigMaps, Secrets, accounts, classes and volumes that a pod names exist."""
    secrets = known_secrets(cluster)
    if (account := pods.spec.get("serviceAccountName")) not in (None, *cluster.names("ServiceAccount")):
        yield f"serviceAccountName {account!r} does not exist"
    priority = pods.spec.get("priorityClassName")
    if priority not in (None, *cluster.names("PriorityClass")) and not str(priority).startswith("system-"):
        yield f"priorityClassName {priority!r} does not exist"
    volumes = {volume.get("name") for volume in pods.spec.get("volumes") or []}
    for kind, name in _references(pods):
        known = cluster.names("ConfigMap") if kind == "ConfigMap" else secrets
        if name not in known:
            yield f"{kind} {name!r} does not exist; there are: {', '.join(sorted(known)) or 'none'}"
    for container in pods.all_containers:
        for mount in container.get("volumeMounts") or []:
            if mount.get("name") not in volumes:
                yield f"container {container.get('name')} mounts {mount.get('name')!r}, which is not a volume"


def known_secrets(cluster: Cluster) -> set[str]:
    """Names of Secrets: those that are here or are made, and those that a namespace says have to exist."""
    listed = {
        name
        for namespace in cluster.of("Namespace")
        for name in str(namespace.annotations.get(SECRETS, "")).split(",")
    }
    made = {str(each.spec.get("secretName")) for each in cluster.of("Certificate")}
    return (listed | made | cluster.names("Secret")) - {""}


def _references(pods: Pods) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of everything that a pod cannot start without."""
    for volume in pods.spec.get("volumes") or []:
        if "configMap" in volume:
            yield "ConfigMap", str(volume["configMap"].get("name"))
        if "secret" in volume:
            yield "Secret", str(volume["secret"].get("secretName"))
    for container in pods.all_containers:
        for variable in container.get("env") or []:
            source = fields_of(variable.get("valueFrom"))
            for key, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                found = fields_of(source.get(key))
                if found and not found.get("optional"):
                    yield kind, str(found.get("name"))


def _end(cluster: Cluster, pods: Pods) -> Iterator[str]:
    """Check that a pod is killed only after everything that comes before."""
    if pods.owner.annotations.get(KNATIVE) == "Knative":
        return  # Knative sets the grace period
    grace = pods.spec.get("terminationGracePeriodSeconds", 30)
    config = _configured(cluster, pods)
    for container in pods.containers:
        pause = fields_of(fields_of(container.get("lifecycle")).get("preStop"))
        sleep = int(fields_of(pause.get("sleep")).get("seconds", 0))
        drain = float(config.get("drain_seconds", 0)) + float(config.get("lame_duck_s", 0))
        if grace <= sleep + drain:
            yield (
                f"terminationGracePeriodSeconds is {grace}, but preStop ({sleep}) and the drain "
                f"({drain:g}) take {sleep + drain:g} s; accepted: more than {sleep + drain:g}"
            )


def _configured(cluster: Cluster, pods: Pods) -> Fields:
    """The settings of the configuration files that a pod mounts."""
    mounted = {
        volume["configMap"].get("name") for volume in pods.spec.get("volumes") or [] if "configMap" in volume
    }
    found: dict[str, Any] = {}
    for each in cluster.of("ConfigMap"):
        if each.name in mounted:
            for key, text in fields_of(each.data.get("data")).items():
                if key.endswith(".toml"):
                    found |= parse_toml(text, f"{each}: {key}")
    return found


def _variables(pods: Pods) -> Iterator[str]:
    """Check that no variable of a Service can be taken for a setting of Fovea."""
    if pods.spec.get("enableServiceLinks") is not False:
        yield (
            "enableServiceLinks is not false; a Service named fovea would set FOVEA_PORT, which is a setting"
        )


def _resources(pods: Pods) -> Iterator[str]:
    for container in pods.all_containers:
        resources = fields_of(container.get("resources"))
        limits, requests = fields_of(resources.get("limits")), fields_of(resources.get("requests"))
        if "memory" not in limits or "cpu" not in requests:
            yield f"container {container.get('name')} has no limit of memory, or requests no CPU"
        for name, value in limits.items():
            if name.startswith("nvidia.com/") and requests.get(name, value) != value:
                yield f"{name}: request and limit differ; GPUs are given whole"


KNOWN = {*GAUGES, *(f"{name}_total" for name in COUNTERS)}
"""Fovea's metrics that tell of a load, without their prefix."""
CUSTOM = "fovea_"
"""Prefix under which prometheus-adapter offers them, because custom metrics cannot have a colon."""
BUILT_IN = ("cpu", "memory")
_QUERIED = re.compile(r"\bfovea:([a-z_]+)")


def check_scale(cluster: Cluster) -> Iterator[str]:
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
        yield f"{service}: scaleMetric is beside autoScaling; accepted: scaleMetric or autoScaling"
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
    bounds: Mapping[str, str] = {"HorizontalPodAutoscaler": "minReplicas", "ScaledObject": "minReplicaCount"}
    for each in cluster.of(*bounds):
        target: Any = fields_of(each.spec.get("scaleTargetRef"))
        if target.get("name") == pods.owner.name:
            return int(each.spec.get(bounds[each.kind], 1))
    return 1


GPU_OF = "fovea/gpu."
"""Prefix of the annotations that name the GPU of each layout."""
RESOURCES = {"nvidia.com/gpu", *(mig_resource(name) for names in MIG_PROFILES.values() for name in names)}


def check_gpu(cluster: Cluster) -> Iterator[str]:
    """Yield a sentence for every fault."""
    for each in cluster.of("ConfigMap"):
        text = fields_of(each.data.get("data")).get("config.yaml")
        if text is not None:
            config = fields_of(yaml.safe_load(str(text)))
            yield from _layouts(each, fields_of(config.get("mig-configs")))
    for pods in cluster.pods():
        for container in pods.containers:
            for name in fields_of(fields_of(container.get("resources")).get("limits")):
                if name.startswith("nvidia.com/") and name not in RESOURCES:
                    yield f"{pods.owner}: no GPU has the resource {name}"


def _layouts(config: Object, layouts: Mapping[str, Any]) -> Iterator[str]:
    for name, parts in layouts.items():
        gpu = str(config.annotations.get(f"{GPU_OF}{name}", ""))
        for part in parts or []:
            wanted = fields_of(fields_of(part).get("mig-devices"))
            if not wanted:
                continue
            if not gpu:
                yield f"{config}: the layout {name} has no annotation {GPU_OF}{name} that names its GPU"
                continue
            profiles = [profile for profile, count in wanted.items() for _ in range(int(count))]
            try:
                good = mig_fits(gpu, profiles)
            except ConfigError as error:
                yield f"{config}: layout {name}: {error.message}"
                continue
            if not good:
                yield f"{config}: layout {name}: {', '.join(profiles)} do not fit on one {gpu}"
