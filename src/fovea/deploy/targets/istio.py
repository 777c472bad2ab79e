"""Istio: a Gateway, a VirtualService and a DestinationRule for the Service of the target `kubernetes`.

If engines stand behind the Service without Fovea's gateway, the header x-experiment chooses a pool, and other
requests are divided by the pools' sizes. With a gateway all requests go to it, because keys, limits and
experiments are the gateway's.

The folder istio/sidecar is a component of kustomize for the overlay that is applied: pods start after their
sidecar, and the sidecar ends after its last connection.
"""

from __future__ import annotations

from typing import Any

from fovea.deploy.formats import yaml_text
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.kubernetes.layout import COMPONENT, OVERLAY, lint
from fovea.deploy.targets.kubernetes.objects import POOL_LABEL, Manifest, manifest

ROOT = "istio"
API = "networking.istio.io/v1"
HEADER = "x-experiment"
RETRY_ON = "connect-failure,refused-stream"
"""An engine has not begun such a request. One with a 5xx may have run for minutes, and must not run again."""
IDLE_S = 60
"""Less than `keep_alive_s` of the server (75), so that no request meets a connection that is being closed."""
CONTROL_PLANE, CONTROL_PORTS = "istio-system", (15012, 15017)


def render(spec: DeploySpec) -> Files:
    """Return all files."""
    objects = {
        "gateway.yaml": [_gateway(spec)],
        "routes.yaml": [_virtual_service(spec)],
        "destinations.yaml": [_destination_rule(spec)],
        "network.yaml": [_control_plane(spec)],
    }
    files = {f"{ROOT}/{path}": yaml_text(*found) for path, found in objects.items()}
    return {
        f"{ROOT}/kustomization.yaml": yaml_text({**OVERLAY, "resources": list(objects)}),
        **files,
        f"{ROOT}/sidecar/kustomization.yaml": yaml_text(_sidecar(spec)),
    }


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Validate the policy, build the folder, and lint it."""
    return (
        Check("kubernetes-validate", ("--strict", f"{{dir}}/{ROOT}/network.yaml"), f"schemas of {ROOT}"),
        Check("kubectl", ("kustomize", f"{{dir}}/{ROOT}"), f"build of {ROOT}"),
        lint(ROOT),
    )


def _host(spec: DeploySpec) -> str:
    return f"{spec.name}.{spec.effective_namespace}.svc.cluster.local"


def _gateway(spec: DeploySpec) -> Manifest:
    server: dict[str, Any] = {
        "hosts": [spec.host],
        "port": {"number": 80, "name": "http", "protocol": "HTTP"},
    }
    if spec.tls:
        server["port"] = {"number": 443, "name": "https", "protocol": "HTTPS"}
        server["tls"] = {"mode": "SIMPLE", "credentialName": f"{spec.name}-tls"}
    body = {"selector": {"istio": "ingressgateway"}, "servers": [server]}
    return manifest(spec, f"{API} Gateway", spec.name, {"spec": body})


def _weights(spec: DeploySpec) -> dict[str, int]:
    """Shares of the pools by their sizes, in percent. They add up to 100, and none is 0."""
    total = sum(pool.replicas for pool in spec.pools)
    found = {pool.name: max(1, pool.replicas * 100 // total) for pool in spec.pools}
    largest = max(found, key=lambda name: found[name])
    found[largest] += 100 - sum(found.values())
    return found


def _virtual_service(spec: DeploySpec) -> Manifest:
    def destination(pool: str = "") -> dict[str, Any]:
        subset = {"subset": pool} if pool else {}
        return {"host": _host(spec), **subset, "port": {"number": spec.proxy_port}}

    common = {
        "timeout": f"{spec.max_answer_s}s",
        "retries": {"attempts": 2, "retryOn": RETRY_ON},
    }
    rules: list[dict[str, Any]] = []
    route: list[dict[str, Any]] = [{"destination": destination()}]
    if spec.gateway is None and len(spec.pools) > 1:
        rules = [
            {
                "name": pool.name,
                "match": [{"headers": {HEADER: {"exact": pool.name}}}],
                "route": [{"destination": destination(pool.name)}],
                **common,
            }
            for pool in spec.pools
        ]
        route = [
            {"destination": destination(name), "weight": weight} for name, weight in _weights(spec).items()
        ]
    rules.append({"name": "default", "route": route, **common})
    body = {
        "hosts": [spec.host, _host(spec)],
        "gateways": [spec.name, "mesh"],
        "http": rules,
    }
    return manifest(spec, f"{API} VirtualService", spec.name, {"spec": body})


def _destination_rule(spec: DeploySpec) -> Manifest:
    policy = {
        "loadBalancer": {"simple": "LEAST_REQUEST"},
        "connectionPool": {
            "tcp": {"connectTimeout": "5s"},
            # Fovea speaks HTTP/1.1.
            "http": {"h2UpgradePolicy": "DO_NOT_UPGRADE", "idleTimeout": f"{IDLE_S}s"},
        },
        # 502, 503 and 504 say that an engine is gone or ends. A 500 is about one request, a 429 says: full.
        "outlierDetection": {
            "consecutiveGatewayErrors": 3,
            "consecutive5xxErrors": 0,
            "interval": "10s",
            "baseEjectionTime": "30s",
            "maxEjectionPercent": 50,
        },
    }
    subsets = [{"name": pool.name, "labels": {POOL_LABEL: pool.name}} for pool in spec.pools]
    body: Manifest = {"host": _host(spec), "trafficPolicy": policy}
    if spec.gateway is None and len(spec.pools) > 1:
        body["subsets"] = subsets
    return manifest(spec, f"{API} DestinationRule", spec.name, {"spec": body})


def _control_plane(spec: DeploySpec) -> Manifest:
    """Sidecars reach Istio's control plane, which the policies of the namespace forbid otherwise."""
    place = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": CONTROL_PLANE}}}
    ports = [{"protocol": "TCP", "port": number} for number in CONTROL_PORTS]
    body = {
        "podSelector": {"matchLabels": {"app.kubernetes.io/part-of": spec.name}},
        "policyTypes": ["Egress"],
        "egress": [{"to": [place], "ports": ports}],
    }
    name = f"{spec.name}-sidecars"
    return manifest(spec, "networking.k8s.io/v1 NetworkPolicy", name, {"spec": body})


def _sidecar(spec: DeploySpec) -> Manifest:
    """A patch of all Deployments: their sidecars start first, and drain for as long as a pod may."""
    proxy = yaml_text(
        {
            "holdApplicationUntilProxyStarts": True,
            # This counts only where the variable below is not known: before Istio 1.12.
            "terminationDrainDuration": f"{spec.stop.grace_s - spec.stop.margin_s}s",
            "proxyMetadata": {
                "EXIT_ON_ZERO_ACTIVE_CONNECTIONS": "true",
                "MINIMUM_DRAIN_DURATION": f"{max(1, spec.stop.pre_stop_s + spec.stop.lame_duck_s)}s",
            },
        }
    )
    patch = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "any"},
        "spec": {"template": {"metadata": {"annotations": {"proxy.istio.io/config": proxy}}}},
    }
    target = {"kind": "Deployment", "labelSelector": f"app.kubernetes.io/part-of={spec.name}"}
    return {**COMPONENT, "patches": [{"target": target, "patch": yaml_text(patch)}]}
