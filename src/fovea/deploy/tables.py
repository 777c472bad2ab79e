"""Tables of a spec about what runs around Fovea: [images], [tracing] and [kubernetes]."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.settings import check_settings, setting
from fovea.deploy.accepted import check_endpoint, check_label, check_optional_image, check_optional_label
from fovea.deploy.images import images


def _image(service: str) -> str:
    return setting("", f"Image of {service}; empty: the one of the table.", check=check_optional_image)


@dataclass(frozen=True, slots=True)
class Images:
    """Container images of the services beside Fovea, in place of those of images.toml."""

    nginx: str = _image("NGINX, an unprivileged one")
    redis: str = _image("Redis")
    prometheus: str = _image("Prometheus")
    alertmanager: str = _image("Alertmanager")
    grafana: str = _image("Grafana")
    collector: str = _image("the OpenTelemetry collector")
    jaeger: str = _image("Jaeger, version 2")

    def __post_init__(self) -> None:
        check_settings(self)

    def of(self, name: str) -> str:
        """Return the image of a service."""
        chosen: str = getattr(self, name)
        return chosen or images()[name].reference


@dataclass(frozen=True, slots=True)
class Tracing:
    """An OpenTelemetry collector, and Jaeger behind it. Engines and gateways send their traces there."""

    share: float = setting(
        1.0, "Share of the requests that are traced, unless their client decides.", low=0, high=1
    )
    backend: str = setting(
        "", "HOST:PORT of your own backend that takes OTLP over gRPC, such as Tempo; empty: render Jaeger.",
        check=check_endpoint,
    )  # fmt: skip
    backend_tls: bool = setting(True, "Your own backend speaks TLS.")
    traces: int = setting(
        50_000, "Traces that Jaeger keeps in its memory; older ones are forgotten.", low=100, high=10_000_000
    )
    memory_mib: int = setting(1024, "Memory of Jaeger, in MiB.", low=128, high=1 << 20)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Settings that only the targets for Kubernetes read."""

    tls_ends: str = setting(
        "pods", "With `tls`, who has the certificate: the pods that clients reach, or a Gateway in front of "
        "them (targets gateway-api and istio).",
        choices=("pods", "gateway"),
    )  # fmt: skip
    issuer: str = setting(
        "", "Issuer of cert-manager that makes the Secret NAME-tls; empty: you create it.",
        check=check_optional_label,
    )  # fmt: skip
    issuer_kind: str = setting("ClusterIssuer", "Kind of the issuer.", choices=("ClusterIssuer", "Issuer"))
    ingress_namespace: str = setting(
        "istio-system", "Namespace of Istio's ingress gateway, which reads the Secret NAME-tls there: the "
        "target istio renders the Certificate of `issuer` into it.",
        check=check_label,
    )  # fmt: skip
    storage_class: str = setting(
        "", "Storage class of volumes; empty: the cluster's default.", check=check_optional_label
    )
    weights_access: str = setting(
        "ReadWriteMany", "Access mode of volumes of weights; with ReadWriteOnce all engines run on one node.",
        choices=("ReadWriteMany", "ReadWriteOnce"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)
