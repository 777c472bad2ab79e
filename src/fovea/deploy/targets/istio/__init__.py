"""Istio: a Gateway, a VirtualService and a DestinationRule for the Service of the target `kubernetes`.

If engines are behind the Service without Fovea's gateway, the header x-experiment chooses a pool, and other
requests are divided by the pools' sizes. With a gateway all requests go to it, because keys, limits and
experiments are the gateway's.

The folder istio/sidecar is a component of kustomize for the overlay that is applied: pods start after their
sidecar, and the sidecar ends after its last connection.
"""

from __future__ import annotations

import yaml

from fovea.deploy.formats import fill_template, yaml_text
from fovea.deploy.front import EXACT, FOLDERS
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.kubernetes import workloads
from fovea.deploy.targets.kubernetes.layout import COMPONENT, OVERLAY, lint
from fovea.deploy.targets.kubernetes.objects import (
    POOL_LABEL,
    Manifest,
    manifest,
    needs_gateway_tls,
    service_port,
)

ROOT = "istio"
API = "networking.istio.io/v1"
HEADER = "x-experiment"


def render(spec: DeploySpec) -> Files:
    """Return all files. Raises ConfigError if the pods behind the Gateway end TLS."""
    needs_gateway_tls(spec)
    divided = spec.gateway is None and len(spec.pools) > 1
    text = fill_template(
        "istio/objects.yaml.j2",
        spec=spec,
        exact=EXACT,
        folders=FOLDERS,
        header=HEADER,
        host=f"{spec.name}.{spec.effective_namespace}.svc.cluster.local",
        pool_label=POOL_LABEL,
        port=service_port(spec),
        weights=_weights(spec) if divided else {},
    )
    bodies = yaml.safe_load(text)
    objects = {
        "gateway.yaml": (f"{API} Gateway", spec.name),
        "routes.yaml": (f"{API} VirtualService", spec.name),
        "destinations.yaml": (f"{API} DestinationRule", spec.name),
        "network.yaml": ("networking.k8s.io/v1 NetworkPolicy", f"{spec.name}-sidecars"),
    }
    files = {
        f"{ROOT}/{path}": yaml_text(manifest(spec, kind, name, {"spec": bodies[kind.split()[1]]}))
        for path, (kind, name) in objects.items()
    }
    if certificate := workloads.certificate(spec, spec.kubernetes.ingress_namespace):
        files[f"{ROOT}/certificate.yaml"] = yaml_text(*certificate)
    resources = [path.removeprefix(f"{ROOT}/") for path in files]
    return {
        f"{ROOT}/kustomization.yaml": yaml_text({**OVERLAY, "resources": resources}),
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


def _weights(spec: DeploySpec) -> dict[str, int]:
    """Shares of the pools by their sizes, in percent. They add up to 100, and none is 0."""
    total = sum(pool.replicas for pool in spec.pools)
    found = {pool.name: max(1, pool.replicas * 100 // total) for pool in spec.pools}
    largest = max(found, key=lambda name: found[name])
    found[largest] += 100 - sum(found.values())
    return found


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
