"""NetworkPolicies: nothing is allowed but what is listed here.

Egress to the internet is for downloads of images and weights. It never reaches private addresses, and never
the metadata service of a cloud (169.254.169.254), from which a pod could read credentials of its node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from fovea.deploy.spec import DeploySpec
from fovea.deploy.targets.kubernetes.objects import PORT, Manifest, manifest, part_name, selector
from fovea.deploy.targets.kubernetes.workloads import REDIS_PORT

NOT_PUBLIC_4 = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4",
)  # fmt: skip
NOT_PUBLIC_6 = (
    "::/96",
    "::ffff:0:0/96",
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "fc00::/7",
    "fe80::/10",
    "ff00::/8",
)
"""Ranges of IANA's registries of special addresses, and addresses that lead to IPv4 ones."""
METADATA = "169.254.0.0/16"
MONITORING_NAMESPACE = "monitoring"
WEB_PORTS = (80, 443)
API_PORTS = (443, 6443)


def policies(spec: DeploySpec) -> list[Manifest]:
    """Return all policies."""
    found = [_deny_all(spec), _dns(spec), _engines(spec)]
    if spec.gateway is not None:
        found += [_gateways(spec), _api_server(spec)]
    if spec.redis is not None:
        found.append(_redis(spec))
    if collector := _collector(spec):
        found.append(collector)
    return found


def _policy(
    spec: DeploySpec,
    name: str,
    pods: dict[str, Any],
    *,
    ingress: Sequence[dict[str, Any]] | None = None,
    egress: Sequence[dict[str, Any]] | None = None,
) -> Manifest:
    rules: dict[str, Any] = {}
    if ingress is not None:
        rules["ingress"] = list(ingress)
    if egress is not None:
        rules["egress"] = list(egress)
    types = [key.capitalize() for key in rules]
    body = {"podSelector": pods, "policyTypes": types, **rules}
    return manifest(spec, "networking.k8s.io/v1 NetworkPolicy", part_name(spec, name), {"spec": body})


def _ports(*numbers: int | str, protocol: str = "TCP") -> list[dict[str, Any]]:
    return [{"protocol": protocol, "port": number} for number in numbers]


def _pods_of(spec: DeploySpec, component: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": selector(spec, component)}}


def _namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _deny_all(spec: DeploySpec) -> Manifest:
    return _policy(spec, "deny-all", {}, ingress=[], egress=[])


def _dns(spec: DeploySpec) -> Manifest:
    server = {**_namespace("kube-system"), "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}
    ports = [*_ports(53, protocol="UDP"), *_ports(53)]
    return _policy(spec, "dns", {}, egress=[{"to": [server], "ports": ports}])


def _internet() -> dict[str, Any]:
    return {
        "to": [
            {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(NOT_PUBLIC_4)}},
            {"ipBlock": {"cidr": "::/0", "except": list(NOT_PUBLIC_6)}},
        ],
        "ports": _ports(*WEB_PORTS),
    }


def _scrape(spec: DeploySpec) -> list[dict[str, Any]]:
    if spec.monitoring is None:
        return []
    return [{"from": [_namespace(MONITORING_NAMESPACE)], "ports": _ports(PORT)}]


def _engines(spec: DeploySpec) -> Manifest:
    clients: dict[str, Any] = {"ports": _ports(PORT)}
    if spec.gateway is not None:
        clients = {"from": [_pods_of(spec, "gateway")], **clients}
    return _policy(
        spec,
        "engine",
        {"matchLabels": selector(spec, "engine")},
        ingress=[clients, *_scrape(spec)],
        egress=[_internet()],
    )


def _gateways(spec: DeploySpec) -> Manifest:
    """Clients come from anywhere: the gateway checks their keys."""
    egress = [{"to": [_pods_of(spec, "engine")], "ports": _ports(PORT)}]
    if spec.redis is not None:
        egress.append({"to": [_pods_of(spec, "redis")], "ports": _ports(REDIS_PORT)})
    egress.append(_internet())
    return _policy(
        spec,
        "gateway",
        {"matchLabels": selector(spec, "gateway")},
        ingress=[{"ports": _ports(PORT)}],
        egress=egress,
    )


def _api_server(spec: DeploySpec) -> Manifest:
    """The address of the API server differs from cluster to cluster, so only its ports are known here."""
    anywhere = [{"ipBlock": {"cidr": "0.0.0.0/0", "except": [METADATA]}}, {"ipBlock": {"cidr": "fc00::/7"}}]
    return _policy(
        spec,
        "gateway-api-server",
        {"matchLabels": selector(spec, "gateway")},
        egress=[{"to": anywhere, "ports": _ports(*API_PORTS)}],
    )


def _redis(spec: DeploySpec) -> Manifest:
    clients = [{"from": [_pods_of(spec, "gateway")], "ports": _ports(REDIS_PORT)}]
    return _policy(spec, "redis", {"matchLabels": selector(spec, "redis")}, ingress=clients)


def _collector(spec: DeploySpec) -> Manifest | None:
    """The collector of traces, in any namespace of the cluster."""
    endpoint = urlsplit(spec.otlp_endpoint)
    if not endpoint.hostname:
        return None
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    senders = {
        "matchExpressions": [
            {"key": "app.kubernetes.io/component", "operator": "In", "values": ["engine", "gateway"]}
        ]
    }
    return _policy(
        spec, "traces", senders, egress=[{"to": [{"namespaceSelector": {}}], "ports": _ports(port)}]
    )
