"""The text of a scrape, in the format that the scraper asks for.

The plain text format is the default. OpenMetrics is written for scrapers that prefer it, as Prometheus does;
only it can hold exemplars: the trace id of a request whose time fell into a bucket.
"""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
VERSIONS = ("", "1.0.0", "0.0.1")
"""Versions of OpenMetrics that a scraper may ask for. They differ in nothing that is written here."""


class Exposition(NamedTuple):
    """The text of a scrape, and its type for the header Content-Type."""

    body: bytes
    media_type: str


def expose(registry: Collector, accept: str = "") -> Exposition:
    """Return the metrics of a registry. accept: the request's Accept header; "": the plain text format."""
    if prefers_openmetrics(accept):
        # prometheus_client's default would write the colons of the names as underscores.
        return Exposition(generate_openmetrics(registry, escaping=ALLOWUTF8), OPENMETRICS)  # type: ignore[no-untyped-call]
    return Exposition(generate_latest(registry), PLAIN)


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header names OpenMetrics, and not text/plain with a higher weight."""
    open_weight = plain_weight = 0.0
    for item in accept.split(","):
        media_type, *pairs = (part.strip() for part in item.split(";"))
        fields = dict(pair.partition("=")[::2] for pair in pairs)
        weight = _weight(fields.get("q", "1"))
        if media_type == "text/plain":
            plain_weight = max(plain_weight, weight)
        elif media_type == "application/openmetrics-text" and fields.get("version", "") in VERSIONS:
            open_weight = max(open_weight, weight)
    return open_weight > 0 and open_weight >= plain_weight


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        return 0.0
    return weight if 0 <= weight <= 1 else 0.0
