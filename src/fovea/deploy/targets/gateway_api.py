"""Gateway API: a Gateway, routes to the deployment's Service, and InferencePools.

    gateway-api/service          Gateway and HTTPRoute to the Service of the target `kubernetes`
    gateway-api/inference-pool   Gateway, InferencePools, and HTTPRoutes to them

They are alternatives. With an InferencePool, an endpoint picker chooses the engine of each request. It
reads the engines' metrics: waiting requests, use of the KV cache, and its configuration. Use the first if
Fovea's gateway is part of the deployment: limits, caches and routing by images are the gateway's.
"""

from __future__ import annotations

from typing import Any

from fovea.deploy.formats import yaml_text
from fovea.deploy.front import EXACT, FOLDERS
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.kubernetes import workloads
from fovea.deploy.targets.kubernetes.layout import OVERLAY, lint
from fovea.deploy.targets.kubernetes.objects import (
    MODEL_LABEL,
    PORT,
    Manifest,
    manifest,
    needs_gateway_tls,
    selector,
    service_port,
    slug,
)

ROOT = "gateway-api"
API = "gateway.networking.k8s.io/v1"
POOL_GROUP, POOL_KIND = "inference.networking.k8s.io", "InferencePool"
OBJECTIVE = "inference.networking.x-k8s.io/v1alpha2 InferenceObjective"
MODEL_HEADER = "X-Gateway-Model-Name"
"""Header with the requested model; a body-based router in front of the routes sets it."""
PICKER_PORT = 9002
PRIORITY, SPOT_PRIORITY = 10, 0


def render(spec: DeploySpec) -> Files:
    """Return all files. Raises ConfigError if the pods behind the Gateway end TLS."""
    needs_gateway_tls(spec)
    service = {"gateway.yaml": [_gateway(spec)], "route.yaml": [_service_route(spec)]}
    models, certificate = _models(spec), workloads.certificate(spec)
    if certificate:
        service["certificate.yaml"] = certificate
    pools = {
        "gateway.yaml": [_gateway(spec)],
        "pools.yaml": [_inference_pool(spec, name) for name in models],
        "routes.yaml": [_pool_route(spec, name, alone=len(models) == 1) for name in models],
        "objectives.yaml": [_objective(spec, name, pools) for name, pools in models.items()],
        "network.yaml": [_open_engines(spec)],
        **({"certificate.yaml": certificate} if certificate else {}),
    }
    return {**_folder("service", service), **_folder("inference-pool", pools)}


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Validate the policy, build both folders, and lint them."""
    policy = f"{{dir}}/{ROOT}/inference-pool/network.yaml"
    return (
        Check("kubernetes-validate", ("--strict", policy), f"schemas of {ROOT}"),
        *(
            check
            for name in ("service", "inference-pool")
            for check in (
                Check("kubectl", ("kustomize", f"{{dir}}/{ROOT}/{name}"), f"build of {ROOT}/{name}"),
                lint(f"{ROOT}/{name}"),
            )
        ),
    )


def _folder(name: str, objects: dict[str, list[Manifest]]) -> Files:
    files = {f"{ROOT}/{name}/{path}": yaml_text(*found) for path, found in objects.items()}
    kustomization = yaml_text({**OVERLAY, "resources": list(objects)})
    return {f"{ROOT}/{name}/kustomization.yaml": kustomization, **files}


def _models(spec: DeploySpec) -> dict[str, list[Pool]]:
    """The pools of each model, by the model's name for clients."""
    found: dict[str, list[Pool]] = {}
    for pool in spec.pools:
        found.setdefault(pool.client_model, []).append(pool)
    return found


def _gateway(spec: DeploySpec) -> Manifest:
    listener: dict[str, Any] = {"name": "http", "hostname": spec.host, "port": 80, "protocol": "HTTP"}
    if spec.tls:
        certificate = {"kind": "Secret", "name": f"{spec.name}-tls"}
        listener |= {"name": "https", "port": 443, "protocol": "HTTPS"}
        listener["tls"] = {"mode": "Terminate", "certificateRefs": [certificate]}
    listener["allowedRoutes"] = {"namespaces": {"from": "Same"}}
    body = {"gatewayClassName": spec.gateway_class, "listeners": [listener]}
    return manifest(spec, f"{API} Gateway", spec.name, {"spec": body})


def _route(
    spec: DeploySpec, name: str, matches: list[dict[str, Any]], backend: dict[str, Any], *, pool: bool
) -> Manifest:
    """A route without retries: a request that an engine has begun must not be sent twice."""
    seconds = f"{spec.max_answer_s}s"
    rule = {
        "matches": matches,
        "backendRefs": [backend],
        "timeouts": {"request": seconds, "backendRequest": seconds},
    }
    section = "https" if spec.tls else "http"
    body = {
        "parentRefs": [{"name": spec.name, "sectionName": section}],
        "hostnames": [spec.host],
        "rules": [rule],
    }
    return manifest(spec, f"{API} HTTPRoute", name, {"spec": body}, "engine" if pool else "")


def _service_route(spec: DeploySpec) -> Manifest:
    backend = {"kind": "Service", "name": spec.name, "port": service_port(spec)}
    return _route(spec, spec.name, _public(), backend, pool=False)


def _pool_route(spec: DeploySpec, model: str, *, alone: bool) -> Manifest:
    """The route of a model. alone: it is the only one, so no header has to tell it."""
    matches = _public()
    if not alone:
        header = {"type": "Exact", "name": MODEL_HEADER, "value": model}
        matches = [{**match, "headers": [header]} for match in matches]
    backend = {"group": POOL_GROUP, "kind": POOL_KIND, "name": _name(spec, model)}
    return _route(spec, _name(spec, model), matches, backend, pool=True)


def _public() -> list[dict[str, Any]]:
    """The public paths. A PathPrefix is the path itself and everything below it."""
    kinds = {"Exact": EXACT, "PathPrefix": FOLDERS}
    return [{"path": {"type": kind, "value": path}} for kind, paths in kinds.items() for path in paths]


def _name(spec: DeploySpec, model: str) -> str:
    return f"{spec.name}-{slug(model)}"


def _inference_pool(spec: DeploySpec, model: str) -> Manifest:
    """All engines of a model. Without its picker, requests go to any of them."""
    found = {
        "app.kubernetes.io/instance": spec.name,
        "app.kubernetes.io/component": "engine",
        MODEL_LABEL: slug(model),
    }
    name = _name(spec, model)
    body = {
        "selector": {"matchLabels": found},
        "targetPorts": [{"number": spec.engine_port}],
        "endpointPickerRef": {
            "kind": "Service",
            "name": f"{name}-epp",
            "port": {"number": PICKER_PORT},
            "failureMode": "FailOpen",
        },
    }
    return manifest(spec, f"{POOL_GROUP}/v1 {POOL_KIND}", name, {"spec": body}, "engine")


def _open_engines(spec: DeploySpec) -> Manifest:
    """Proxies and pickers reach the engines. Where they run is not known here; engines check their key."""
    body = {
        "podSelector": {"matchLabels": selector(spec, "engine")},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"protocol": "TCP", "port": PORT}]}],
    }
    name = f"{spec.name}-inference-pool"
    return manifest(spec, "networking.k8s.io/v1 NetworkPolicy", name, {"spec": body})


def _objective(spec: DeploySpec, model: str, pools: list[Pool]) -> Manifest:
    """The priority of a model's requests: below others if all of its engines run on spot machines."""
    priority = SPOT_PRIORITY if all(pool.spot for pool in pools) else PRIORITY
    name = _name(spec, model)
    reference = {"group": POOL_GROUP, "kind": POOL_KIND, "name": name}
    return manifest(spec, OBJECTIVE, name, {"spec": {"poolRef": reference, "priority": priority}}, "engine")
