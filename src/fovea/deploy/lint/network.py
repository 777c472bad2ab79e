"""Checks of Services, NetworkPolicies and PodMonitors, and of routes of Istio and of the Gateway API.

Routes are compared with Services only if any are among the objects: a folder of routes may be applied apart
from them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

from fovea.deploy.lint.objects import Cluster, Fields, Object, Pods, fields_of, selects
from fovea.deploy.lint.pods import known_secrets

METADATA = ipaddress.ip_address("169.254.169.254")
"""Address of the metadata service of clouds."""


def check_network(cluster: Cluster) -> Iterator[str]:
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
                yield f"{service}: targetPort {target!r} is not a port of {each.owner}"


def _policy(policy: Object, pods: list[Pods]) -> Iterator[str]:
    selector = fields_of(policy.spec.get("podSelector"))
    found = _found(selector, pods)
    if pods and not found:
        yield f"{policy}: its podSelector finds no pods"
    for rule in policy.spec.get("ingress") or []:
        for port in rule.get("ports") or []:
            for each in found:
                if port.get("port") not in each.ports():
                    yield f"{policy}: port {port.get('port')!r} is not a port of {each.owner}"
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
    for each in (network, *holes):
        if isinstance(each, ipaddress.IPv6Network) and each.network_address.ipv4_mapped:
            yield f"{policy}: {each} is an IPv4-mapped address, which Kubernetes refuses"
    for each in holes:
        if each.version != network.version or each == network or not _within(each, network):
            yield f"{policy}: {each} in `except` is not a part of {network}, which Kubernetes refuses"
    if METADATA in network and not any(METADATA in hole for hole in holes):
        yield (
            f"{policy}: {network} reaches {METADATA}, the metadata service; accepted: {METADATA} in `except`"
        )


def _within(part: Any, whole: Any) -> bool:
    """Tell whether a network is a part of another one of the same version."""
    return bool(part.subnet_of(whole))


def _monitor(cluster: Cluster, monitor: Object, pods: list[Pods]) -> Iterator[str]:
    found = _found(fields_of(monitor.spec.get("selector")), pods)
    if pods and not found:
        yield f"{monitor}: its selector finds no pods"
    for endpoint in monitor.spec.get("podMetricsEndpoints") or []:
        for each in found:
            if endpoint.get("port") not in each.ports():
                yield f"{monitor}: port {endpoint.get('port')!r} is not a port of {each.owner}"
        secret = fields_of(fields_of(endpoint.get("authorization")).get("credentials")).get("name")
        if secret is not None and cluster.names("Namespace") and secret not in known_secrets(cluster):
            yield f"{monitor}: Secret {secret!r} does not exist"


SAFE_RETRIES = {"connect-failure", "refused-stream"}
"""Conditions under which a backend has not begun a request."""
ISTIO = "networking.istio.io/"


def check_routes(cluster: Cluster) -> Iterator[str]:
    """Yield a sentence for every fault."""
    for each in cluster.objects:
        if each.api.startswith(ISTIO) and each.api != f"{ISTIO}v1":
            yield f"{each}: apiVersion is {each.api}; accepted: {ISTIO}v1"
    for each in cluster.of("VirtualService"):
        yield from _virtual_service(cluster, each)
    for each in cluster.of("HTTPRoute"):
        yield from _http_route(cluster, each)
    for each in cluster.of("InferencePool"):
        yield from _inference_pool(cluster, each)
    for each in cluster.of("InferenceObjective"):
        name = fields_of(each.spec.get("poolRef")).get("name")
        if name not in cluster.names("InferencePool"):
            yield f"{each}: InferencePool {name!r} does not exist"


def _virtual_service(cluster: Cluster, service: Object) -> Iterator[str]:
    subsets = _subsets(cluster)
    gateways = {"mesh", *(each.name for each in cluster.of("Gateway") if each.api.startswith(ISTIO))}
    for name in service.spec.get("gateways") or []:
        if name not in gateways:
            yield f"{service}: Gateway {name!r} does not exist"
    rules = [fields_of(each) for each in service.spec.get("http") or []]
    for number, rule in enumerate(rules):
        where = f"{service}: http[{number}]"
        if "match" not in rule and number < len(rules) - 1:
            yield f"{where} matches every request, so the rules after it are never used"
        yield from _weights(where, rule.get("route") or [])
        retried = set(filter(None, str(fields_of(rule.get("retries")).get("retryOn", "")).split(",")))
        if "retries" not in rule or retried - SAFE_RETRIES:
            yield (
                f"{where} retries on {', '.join(sorted(retried)) or 'what Istio does by default'}; accepted: "
                f"{', '.join(sorted(SAFE_RETRIES))}, because other requests may have been computed"
            )
        if "timeout" not in rule:
            yield f"{where} has no timeout"
        for entry in rule.get("route") or []:
            yield from _destination(cluster, where, fields_of(fields_of(entry).get("destination")), subsets)


def _weights(where: str, route: list[Any]) -> Iterator[str]:
    weights = [int(weight) for each in route if (weight := fields_of(each).get("weight")) is not None]
    if len(route) > 1 and len(weights) < len(route):
        yield f"{where}: a destination without weight gets no request beside others that have one"
    elif len(route) > 1 and sum(weights) != 100:
        yield f"{where}: the weights add up to {sum(weights)}; accepted: 100"


def _subsets(cluster: Cluster) -> dict[str, set[str]]:
    """Names of the subsets by host."""
    found: dict[str, set[str]] = {}
    for each in cluster.of("DestinationRule"):
        names = {str(fields_of(subset).get("name")) for subset in each.spec.get("subsets") or []}
        found.setdefault(str(each.spec.get("host")), set()).update(names)
    return found


def _destination(
    cluster: Cluster, where: str, destination: Any, subsets: dict[str, set[str]]
) -> Iterator[str]:
    host, subset = str(destination.get("host")), destination.get("subset")
    if subset is not None and subset not in subsets.get(host, set()):
        yield f"{where}: no DestinationRule of {host} has a subset {subset!r}"
    number = fields_of(destination.get("port")).get("number")
    yield from _routed_service(cluster, where, host.partition(".")[0], number)


def _routed_service(cluster: Cluster, where: str, name: str, port: Any) -> Iterator[str]:
    services = {each.name: each for each in cluster.of("Service")}
    if not services:
        return
    if name not in services:
        yield f"{where}: Service {name!r} does not exist"
    elif port not in {each.get("port") for each in services[name].spec.get("ports") or []}:
        yield f"{where}: {port!r} is not a port of Service {name}"


def _http_route(cluster: Cluster, route: Object) -> Iterator[str]:
    listeners = {
        (each.name, fields_of(listener).get("name"))
        for each in cluster.of("Gateway")
        for listener in each.spec.get("listeners") or []
    }
    for parent in route.spec.get("parentRefs") or []:
        if (parent.get("name"), parent.get("sectionName")) not in listeners:
            yield f"{route}: Gateway {parent.get('name')!r} has no listener {parent.get('sectionName')!r}"
    rules = [fields_of(each) for each in route.spec.get("rules") or []]
    for number, rule in enumerate(rules):
        where = f"{route}: rules[{number}]"
        if "request" not in fields_of(rule.get("timeouts")):
            yield f"{where} has no timeout of the request"
        if "retry" in rule:
            yield f"{where} retries; a request that an engine has begun must not be sent again"
        for backend in rule.get("backendRefs") or []:
            kind, name = backend.get("kind", "Service"), str(backend.get("name"))
            if kind == "Service":
                yield from _routed_service(cluster, where, name, backend.get("port"))
            elif name not in cluster.names(kind):
                yield f"{where}: {kind} {name!r} does not exist"


def _inference_pool(cluster: Cluster, pool: Object) -> Iterator[str]:
    picker = fields_of(pool.spec.get("endpointPickerRef"))
    if picker.get("kind", "Service") == "Service" and "number" not in fields_of(picker.get("port")):
        yield f"{pool}: endpointPickerRef names a Service without its port"
    pods = cluster.pods()
    found = [each for each in pods if selects(pool.spec.get("selector"), each.labels)]
    if pods and not found:
        yield f"{pool}: its selector finds no pods"
    for port in pool.spec.get("targetPorts") or []:
        for each in found:
            if port.get("number") not in each.ports():
                yield f"{pool}: {port.get('number')} is not a port of {each.owner}"
