"""Checks of Services, NetworkPolicies and PodMonitors: whether their selectors and ports find pods."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from fovea.deploy.lint.objects import Cluster, Fields, Object, Pods, fields_of, selects
from fovea.deploy.lint.pods import known_secrets

METADATA = ipaddress.ip_address("169.254.169.254")
"""Address of the metadata service of clouds."""


def check(cluster: Cluster) -> Iterator[str]:
    """Yield a sentence for every fault."""
    pods = cluster.pods()
    for each in cluster.of("Service"):
        yield from _service(each, pods)
    for each in cluster.of("NetworkPolicy"):
        yield from _policy(each, pods)
    for each in cluster.of("PodMonitor"):
        yield from _monitor(cluster, each, pods)
    for each in cluster.of("Deployment", "StatefulSet"):
        labels = fields_of(fields_of(fields_of(each.spec.get("template")).get("metadata")).get("labels"))
        if not selects(each.spec.get("selector"), labels):
            yield f"{each}: its selector does not match the labels of its own pods"
    if pods and not any(_denies_all(each) for each in cluster.of("NetworkPolicy")):
        yield "no NetworkPolicy denies all that others do not allow; accepted: one for {} without rules"


def _denies_all(policy: Object) -> bool:
    spec = policy.spec
    closed = not spec.get("ingress") and not spec.get("egress") and not spec.get("podSelector")
    return closed and set(spec.get("policyTypes") or []) == {"Ingress", "Egress"}


def _found(selector: Fields, pods: list[Pods]) -> list[Pods]:
    return [each for each in pods if selects(selector, each.labels)]


def _service(service: Object, pods: list[Pods]) -> Iterator[str]:
    found = _found({"matchLabels": fields_of(service.spec.get("selector"))}, pods)
    if not found:
        yield f"{service}: its selector finds no pods"
    for port in service.spec.get("ports") or []:
        target = port.get("targetPort", port.get("port"))
        for each in found:
            if target not in each.ports():
                yield f"{service}: targetPort {target!r} is no port of {each.owner}"


def _policy(policy: Object, pods: list[Pods]) -> Iterator[str]:
    selector = fields_of(policy.spec.get("podSelector"))
    found = _found(selector, pods)
    if pods and not found:
        yield f"{policy}: its podSelector finds no pods"
    for rule in policy.spec.get("ingress") or []:
        for port in rule.get("ports") or []:
            for each in found:
                if port.get("port") not in each.ports():
                    yield f"{policy}: port {port.get('port')!r} is no port of {each.owner}"
    for direction, key in (("ingress", "from"), ("egress", "to")):
        for rule in policy.spec.get(direction) or []:
            for peer in rule.get(key) or []:
                yield from _peer(policy, fields_of(peer), pods)


def _peer(policy: Object, peer: Fields, pods: list[Pods]) -> Iterator[str]:
    is_local = "podSelector" in peer and "namespaceSelector" not in peer
    if is_local and pods and not _found(fields_of(peer["podSelector"]), pods):
        yield f"{policy}: a podSelector of its rules finds no pods"
    block = fields_of(peer.get("ipBlock"))
    if not block:
        return
    network = ipaddress.ip_network(str(block.get("cidr")))
    holes = [ipaddress.ip_network(str(each)) for each in block.get("except") or []]
    if METADATA in network and not any(METADATA in hole for hole in holes):
        yield f"{policy}: {network} reaches {METADATA}, the metadata service; accepted: with it in `except`"


def _monitor(cluster: Cluster, monitor: Object, pods: list[Pods]) -> Iterator[str]:
    found = _found(fields_of(monitor.spec.get("selector")), pods)
    if pods and not found:
        yield f"{monitor}: its selector finds no pods"
    for endpoint in monitor.spec.get("podMetricsEndpoints") or []:
        for each in found:
            if endpoint.get("port") not in each.ports():
                yield f"{monitor}: port {endpoint.get('port')!r} is no port of {each.owner}"
        secret = fields_of(fields_of(endpoint.get("authorization")).get("credentials")).get("name")
        if secret is not None and cluster.names("Namespace") and secret not in known_secrets(cluster):
            yield f"{monitor}: Secret {secret!r} does not exist"
