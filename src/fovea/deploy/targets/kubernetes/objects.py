"""Names, labels and the common form of objects. The targets for Kubernetes share them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from fovea.core.errors import ConfigError
from fovea.deploy.spec import DeploySpec, Pool

Manifest = dict[str, Any]
RESERVED = ("gateway", "redis", "collector", "jaeger")
"""Names of pools that would give two objects one name."""
POOL_LABEL, MODEL_LABEL = "fovea-pool", "fovea-model"
SECRETS = "fovea/secrets"
"""Annotation of the Namespace: the Secrets that have to exist; they are never rendered."""
TRUSTED = ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
"""Networks of pods and nodes. Without `trusted_proxies`, proxies with such an address are trusted."""
PORT, SERVICE_PORT = "http1", "http"
"""Names of the port of engines and gateways, and of Services. Knative knows HTTP/1.1 by the name http1."""


def check_names(spec: DeploySpec) -> None:
    """Raise ConfigError if a pool's name is one that the renderer needs."""
    for pool in spec.pools:
        if pool.name in RESERVED:
            raise ConfigError(
                f"[[pool]]: the name {pool.name!r} is used by other objects; accepted: any but "
                f"{', '.join(RESERVED)}",
                param="name",
            )


def pool_name(spec: DeploySpec, pool: Pool) -> str:
    """Name of a pool's Deployment, Service and other objects."""
    return f"{spec.name}-{pool.name}"


def part_name(spec: DeploySpec, part: str) -> str:
    """Name of the objects of a part: gateway, redis, engine."""
    return f"{spec.name}-{part}"


def front_component(spec: DeploySpec) -> str:
    """The component that clients reach."""
    return "gateway" if spec.gateway is not None else "engine"


def ends_tls(spec: DeploySpec, component: str) -> bool:
    """Tell whether the pods of a component have the certificate."""
    return spec.tls and spec.kubernetes.tls_ends == "pods" and component == front_component(spec)


def service_port(spec: DeploySpec) -> int:
    """The port of the Service for clients or a Gateway. Behind a Gateway that ends TLS it is plain HTTP."""
    return 80 if spec.tls and spec.kubernetes.tls_ends == "gateway" else spec.public_port


def needs_gateway_tls(spec: DeploySpec) -> None:
    """Raise ConfigError if a Gateway should end TLS, and the pods behind it do."""
    if spec.tls and spec.kubernetes.tls_ends == "pods":
        raise ConfigError(
            'with tls = true and [kubernetes] tls_ends = "pods", the pods have the certificate; accepted for '
            'a Gateway in front of them: tls_ends = "gateway"',
            param="tls_ends",
        )


def slug(text: str) -> str:
    """Return a DNS label of at most 28 characters for any text, with a digest if the text is not a label."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if plain == text and len(plain) <= 28:
        return plain
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]
    return f"{plain[:21].rstrip('-') or 'model'}-{digest}"


def selector(spec: DeploySpec, component: str, pool: Pool | None = None) -> dict[str, str]:
    """Labels that find the pods of a component, or of one pool."""
    found = {
        "app.kubernetes.io/name": "fovea",
        "app.kubernetes.io/instance": spec.name,
        "app.kubernetes.io/component": component,
    }
    return found if pool is None else {**found, POOL_LABEL: pool.name}


def labels(spec: DeploySpec, component: str, pool: Pool | None = None) -> dict[str, str]:
    """All labels of the objects and pods of a component."""
    own = {} if pool is None else {MODEL_LABEL: slug(pool.client_model)}
    return {
        **selector(spec, component, pool),
        "app.kubernetes.io/part-of": spec.name,
        "app.kubernetes.io/managed-by": "fovea-deploy",
        **own,
    }


def manifest(
    spec: DeploySpec,
    kind: str,
    name: str,
    body: Mapping[str, Any],
    component: str = "",
    pool: Pool | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """Return an object of the deployment's namespace.

    kind: "GROUP/VERSION Kind", such as "apps/v1 Deployment".
    component: a part of its labels; "": it gets those of no component.
    """
    version, _, name_of_kind = kind.rpartition(" ")
    own = labels(spec, component, pool) if component else {"app.kubernetes.io/part-of": spec.name}
    metadata: Manifest = {"name": name, "namespace": spec.effective_namespace, "labels": own}
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": version, "kind": name_of_kind, "metadata": metadata, **body}


def cluster_manifest(spec: DeploySpec, kind: str, name: str, body: Mapping[str, Any]) -> Manifest:
    """Return an object that belongs to no namespace."""
    found = manifest(spec, kind, name, body)
    del found["metadata"]["namespace"]
    return found
