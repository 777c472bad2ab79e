"""fovea metrics: print the table of all metrics, or compare it with a running server or gateway."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from fovea.cli.metrics_table import Row, gateway_rows, markdown, server_rows
from fovea.cli.server_call import call_server
from fovea.core.errors import ConfigError
from fovea.gateway.metrics import PREFIX


def register(commands: Any) -> None:
    parser = commands.add_parser("metrics", description=__doc__)
    parser.add_argument("--url", help="URL of a server or gateway whose /metrics is compared with the table")
    parser.add_argument(
        "--api-key",
        default=(os.environ.get("FOVEA_METRICS_KEY") or os.environ.get("FOVEA_API_KEY") or "").split(",")[0],
        metavar="KEY",
        help="key for /metrics (default: the first of FOVEA_METRICS_KEY, or of FOVEA_API_KEY)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.url is None:
        print(markdown())
        return 0
    exported = exported_names(scrape(args.url, args.api_key.strip()))
    rows = gateway_rows() if any(name.startswith(PREFIX) for name in exported) else server_rows()
    known = {name for row in rows for name in names_of(row)}
    missing = [row for row in rows if set(names_of(row)) - exported]
    optional = [row.name for row in missing if row.optional]
    required = [row.name for row in missing if not row.optional]
    unknown = sorted(exported - known)
    for title, names in (("missing", required), ("not here", optional), ("unknown", unknown)):
        for name in names:
            print(f"{title}: {name}")
    print(f"{len(exported & known)} of {len(known)} names are exported")
    if optional:
        print('"not here": metrics that need a GPU, a cgroup or a loaded model', file=sys.stderr)
    return 1 if required or unknown else 0


def names_of(row: Row) -> tuple[str, ...]:
    """Return the name of a metric and those of its copies."""
    return (row.name, *row.alias_names(of_documents=False), *row.alias_names(of_documents=True))


def exported_names(text: str) -> set[str]:
    """Return the names in a scrape, counters with the suffix `_total`. Raises ConfigError for other text."""
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise ConfigError(
            f"the answer is not in the text format of Prometheus: {error}", param="url"
        ) from error
    names = {f"{one.name}_total" if one.type == "counter" else one.name for one in families}
    # Times of creation are exported beside counters and histograms, as metrics of their own.
    return {name for name in names if not name.endswith("_created")}


def scrape(url: str, key: str) -> str:
    """Return the text of /metrics. Raises ConfigError, with the reason, if that fails."""
    status, body = call_server(url, "/metrics", key=key)
    if status != 200:
        raise ConfigError(f"{url}/metrics answered with status {status}; it may need --api-key", param="url")
    return body.decode(errors="replace")
