"""Checks of pods: security, probes, the time that they have to end, and what they name."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from fovea.deploy.lint.objects import KNATIVE, Cluster, Fields, Pods, fields_of
from fovea.deploy.targets.kubernetes.objects import SECRETS

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def check(cluster: Cluster) -> Iterator[str]:
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
    for container in pods.containers:
        for kind in PROBES:
            probe = fields_of(container.get(kind))
            if not probe:
                yield f"container {container.get('name')} has no {kind}"
                continue
            action = fields_of(probe.get("httpGet") or probe.get("tcpSocket"))
            if action.get("port") not in ports:
                yield f"{kind} asks port {action.get('port')!r}; ports of the pod: {_listed(ports)}"
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
                yield f"container {container.get('name')} mounts {mount.get('name')!r}, which is no volume"


def known_secrets(cluster: Cluster) -> set[str]:
    """Names of Secrets: those that are here, and those that a namespace says have to exist."""
    listed = {
        name
        for namespace in cluster.of("Namespace")
        for name in str(namespace.annotations.get(SECRETS, "")).split(",")
    }
    return (listed | cluster.names("Secret")) - {""}


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
                f"({drain:g}) take {sleep + drain:g}; accepted: more than that"
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
                    found |= tomllib.loads(text)
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
