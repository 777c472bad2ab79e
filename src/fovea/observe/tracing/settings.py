"""Settings of traces."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from fovea.core.settings import check_settings, setting


def check_endpoint(value: str) -> str:
    """Return "" if an endpoint is accepted, else what is accepted."""
    words = "the URL of a collector, such as http://collector:4318, or nothing"
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return words
    return "" if not value or (good and not parts.query and not parts.fragment) else words


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Traces for OpenTelemetry."""

    otlp_endpoint: str = setting(
        "",
        "URL of an OpenTelemetry collector (OTLP over HTTP), such as http://collector:4318; spans go to "
        "/v1/traces there. Empty: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT; without "
        "these, no traces. Needs the extra otel.",
        check=check_endpoint,
    )
    trace_share: float = setting(
        1.0,
        "Share of the requests that are traced if the client does not decide. A client decides with the "
        "header traceparent.",
        low=0,
        high=1,
    )
    trace_content: bool = setting(
        False,
        "Traces hold the texts of prompts and answers, up to 8,192 characters each. They never hold images.",
    )
    trace_legacy_names: bool = setting(
        False, "Spans also have the attributes of vLLM's traces, such as gen_ai.latency.time_in_queue."
    )

    def __post_init__(self) -> None:
        check_settings(self)
