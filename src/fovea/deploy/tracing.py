"""Traces of a rendered deployment go to an OpenTelemetry collector, then to Jaeger or your own backend.

The collector takes traces at once, and keeps them while the backend is away. Jaeger keeps the last traces in
its memory: they show what happened lately, and are gone after a restart.
"""

from __future__ import annotations

from typing import Any

from fovea.core.errors import ConfigError
from fovea.deploy.formats import yaml_text
from fovea.deploy.spec import DeploySpec
from fovea.deploy.tables import Tracing
from fovea.deploy.target import Check

GRPC_PORT, HTTP_PORT, UI_PORT, HEALTH_PORT = 4317, 4318, 16686, 13133
"""Ports of OTLP over gRPC and over HTTP, of Jaeger's page, and of the collector's health."""
PROGRAMS = {"collector": "otelcol", "jaeger": "jaeger"}
FOLDER = "/etc/fovea-traces"
"""Folder of the configuration in containers."""
COLLECTOR_MIB = 512
COMMENT = "Rendered by `fovea deploy render`. docs/tracing.md explains it."
Values = dict[str, Any]


def trace_values(spec: DeploySpec, collector: str = "") -> Values:
    """Return the settings by which a server sends its traces; empty: it sends none.

    collector: host of the rendered collector.
    Raises ConfigError if the target renders no collector, and the spec wants one.
    """
    if spec.tracing is None:
        return {"otlp_endpoint": spec.otlp_endpoint} if spec.otlp_endpoint else {}
    if not collector:
        raise ConfigError(
            "[tracing] is rendered by compose and the targets for Kubernetes; accepted here: [monitoring] "
            "otlp_endpoint",
            param="tracing",
        )
    address = f"http://{collector}:{GRPC_PORT}"
    return {"otlp_endpoint": address, "otlp_protocol": "grpc", "trace_share": spec.tracing.share}


def collector_config(tracing: Tracing, jaeger: str) -> str:
    """Return the configuration of the collector. jaeger: host of Jaeger."""
    own = tracing.backend
    return yaml_text(
        {
            "extensions": {"health_check": {"endpoint": f"0.0.0.0:{HEALTH_PORT}"}},
            "receivers": {
                "otlp": {
                    "protocols": {
                        "grpc": {"endpoint": f"0.0.0.0:{GRPC_PORT}"},
                        "http": {"endpoint": f"0.0.0.0:{HTTP_PORT}"},
                    }
                }
            },
            "processors": {
                "memory_limiter": {
                    "check_interval": "1s",
                    "limit_percentage": 75,
                    "spike_limit_percentage": 20,
                },
                "batch": {"timeout": "1s", "send_batch_size": 1024, "send_batch_max_size": 2048},
            },
            "exporters": {
                "otlp_grpc": {
                    "endpoint": own or f"{jaeger}:{GRPC_PORT}",
                    "tls": {"insecure": not (own and tracing.backend_tls)},
                    "retry_on_failure": {"max_elapsed_time": "5m"},
                }
            },
            "service": {
                "extensions": ["health_check"],
                "pipelines": {
                    "traces": {
                        "receivers": ["otlp"],
                        "processors": ["memory_limiter", "batch"],
                        "exporters": ["otlp_grpc"],
                    }
                },
                "telemetry": {"metrics": {"level": "none"}},
            },
        },
        comment=COMMENT,
    )


def jaeger_config(tracing: Tracing) -> str:
    """Return the configuration of Jaeger."""
    return yaml_text(
        {
            "extensions": {
                "jaeger_storage": {"backends": {"memory": {"memory": {"max_traces": tracing.traces}}}},
                "jaeger_query": {
                    "storage": {"traces": "memory"},
                    "http": {"endpoint": f"0.0.0.0:{UI_PORT}"},
                },
            },
            "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": f"0.0.0.0:{GRPC_PORT}"}}}},
            "processors": {"batch": {}},
            "exporters": {"jaeger_storage_exporter": {"trace_storage": "memory"}},
            "service": {
                "extensions": ["jaeger_storage", "jaeger_query"],
                "pipelines": {
                    "traces": {
                        "receivers": ["otlp"],
                        "processors": ["batch"],
                        "exporters": ["jaeger_storage_exporter"],
                    }
                },
                "telemetry": {"metrics": {"level": "none"}},
            },
        },
        comment=COMMENT,
    )


def parts(spec: DeploySpec) -> list[str]:
    """Return the names of the services of [tracing]."""
    if spec.tracing is None:
        return []
    return ["collector", *(["jaeger"] if has_jaeger(spec) else [])]


def configs(spec: DeploySpec, jaeger: str = "jaeger") -> dict[str, str]:
    """Return the configuration of each service of [tracing]. jaeger: host of Jaeger."""
    if spec.tracing is None:
        return {}
    texts = {"collector": collector_config(spec.tracing, jaeger), "jaeger": jaeger_config(spec.tracing)}
    return {part: texts[part] for part in parts(spec)}


def tracing_checks(spec: DeploySpec, path: str) -> tuple[Check, ...]:
    """Return the checks of the configurations. path: their path under the output folder, with {part}."""
    return tuple(
        Check(
            PROGRAMS[part],
            ("validate", f"--config={{dir}}/{path.format(part=part)}"),
            f"{part} reads its settings",
        )
        for part in parts(spec)
    )


def has_jaeger(spec: DeploySpec) -> bool:
    """Tell whether Jaeger is rendered."""
    return spec.tracing is not None and not spec.tracing.backend


def jaeger_source(url: str) -> Values:
    """Return Grafana's data source of Jaeger. url: its address for Grafana."""
    return {"name": "Jaeger", "uid": "fovea-jaeger", "type": "jaeger", "access": "proxy", "url": url}
