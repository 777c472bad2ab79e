"""fovea metrics: print the table of all metrics, or compare it with a running server or gateway."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from fovea.cli.common import call_server
from fovea.cli.text import fitted
from fovea.core.errors import ConfigError
from fovea.gateway import metrics as gateway
from fovea.gateway.metrics import PREFIX
from fovea.observe.aliases import (
    ALIASES,
    CACHE_CONFIG,
    CACHE_CONFIG_LABELS,
    CACHE_CONFIG_TEXT,
    FOREIGN,
    Alias,
)
from fovea.observe.exposition import CGROUP, PROCESS
from fovea.observe.table import (
    COUNTERS,
    DEVICE_COUNTERS,
    DEVICE_GAUGES,
    DEVICE_LABEL,
    DISTRIBUTIONS,
    GAUGES,
    INFO_LABELS,
    INFO_TEXT,
    LABELLED,
    RATES,
    RELEVANCE_GAUGES,
    RELEVANCE_SPREADS,
    SHARES,
    SPREADS,
    TENSION_GAUGE,
    TENSION_TEXT,
    TOTALS,
)

UNITS = ("seconds", "bytes", "ms", "tokens", "celsius", "watts", "joules", "share", "perc", "percent")


class Row(NamedTuple):
    """One metric.

    name: as it is exported, with the suffix `_total` of counters.
    aliases: its copies under other names.
    optional: whether it is absent where there is no GPU, no cgroup or no loaded model.
    """

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()
    aliases: tuple[Alias, ...] = ()
    optional: bool = False

    @property
    def unit(self) -> str:
        """The unit that the name ends with; "": a plain number."""
        word = self.name.removesuffix("_total").rpartition("_")[2]
        return word if word in UNITS else ""

    def alias_names(self, *, of_documents: bool) -> tuple[str, ...]:
        """The names of its copies: those of the documents, or those of vLLM."""
        suffix = "_total" if self.kind == "counter" else ""
        chosen = (alias for alias in self.aliases if (alias.source == "documents") == of_documents)
        return tuple(alias.name + suffix for alias in chosen)


def server_rows() -> list[Row]:
    """Return every metric of a server with its own name."""
    return [
        Row("fovea:info", "gauge", INFO_TEXT, INFO_LABELS),
        *_rows("gauge", GAUGES),
        *_rows("counter", COUNTERS),
        *(_row(name, "counter", row.text, (row.label,)) for name, row in LABELLED.items()),
        *_rows("gauge", {name: rate.text for name, rate in RATES.items()}),
        *_rows("gauge", {name: share.text for name, share in SHARES.items()}),
        *_rows("histogram", {name: row.text for name, row in DISTRIBUTIONS.items()}),
        *(_row(name, "counter", total.text, total.labels) for name, total in TOTALS.items()),
        *(
            _row(name, "histogram", spread.text, (spread.label,) if spread.label else ())
            for name, spread in SPREADS.items()
        ),
        *(
            _row(name, kind, text, (DEVICE_LABEL,), optional=True)
            for kind, rows in (("gauge", DEVICE_GAUGES), ("counter", DEVICE_COUNTERS))
            for name, text in rows.items()
        ),
        Row(CACHE_CONFIG, "gauge", CACHE_CONFIG_TEXT, ("model_name", "engine", *CACHE_CONFIG_LABELS),
            optional=True),
        *(Row(name, "gauge", text) for name, text in RELEVANCE_GAUGES.items()),
        Row(TENSION_GAUGE, "gauge", TENSION_TEXT, ("tension",)),
        *(Row(name, "histogram", text) for name, (text, _) in RELEVANCE_SPREADS.items()),
        *_process_rows(),
    ]  # fmt: skip


def gateway_rows() -> list[Row]:
    """Return every metric of a gateway."""
    kinds = {"counter": gateway.COUNTERS, "histogram": gateway.HISTOGRAMS, "gauge": gateway.GAUGES}
    return [
        *(
            Row(_exported(gateway.PREFIX + name, kind), kind, row.text, row.labels)
            for kind, rows in kinds.items()
            for name, row in rows.items()
        ),
        *_process_rows(),
    ]


def _rows(kind: str, texts: Mapping[str, str]) -> Iterator[Row]:
    for name, text in texts.items():
        yield _row(name, kind, text)


def _row(name: str, kind: str, text: str, labels: tuple[str, ...] = (), *, optional: bool = False) -> Row:
    aliases = tuple(alias for alias in ALIASES if alias.of == name)
    return Row(_exported(f"fovea:{name}", kind), kind, text, labels, aliases, optional)


def _process_rows() -> Iterator[Row]:
    for name, (kind, text) in PROCESS.items():
        yield Row(_exported(name, kind), kind, text)
    for name, text in CGROUP.items():
        yield Row(name, "gauge", text, optional=True)


def _exported(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def listing() -> str:
    """Return every metric of a server and of a gateway, and the names of other systems, for a terminal."""
    parts = [
        "Metrics of a server\n",
        *map(_entry, server_rows()),
        "\nMetrics of a gateway\n",
        *map(_entry, gateway_rows()),
        "\nNames of other systems, and what to ask for instead\n",
        *(
            f"{one.name} ({one.system})\n    {' '.join(filter(None, (one.query, one.note)))}"
            for one in FOREIGN
        ),
    ]
    return fitted("\n".join(parts))


def _entry(row: Row) -> str:
    """Return the name of a metric with its kind, labels and copies, and below them its meaning."""
    lines = [f"{row.name} ({' of '.join(filter(None, (row.kind, row.unit)))})", f"    {row.text}"]
    if row.labels:
        lines.append(f"    labels: {', '.join(row.labels)}")
    if row.aliases:
        lines.append(f"    also exported as {', '.join(_copy(row, alias) for alias in row.aliases)}")
    return "\n".join(lines)


def _copy(row: Row, alias: Alias) -> str:
    """Return the name of a copy, and its expression if its values are other ones."""
    times = f"{alias.scale:g} * " if alias.scale != 1 else ""
    part = f'{{{row.labels[0]}="{alias.value}"}}' if alias.value else ""
    name = _exported(alias.name, row.kind)
    return f"{name} = {times}{row.name}{part}" if times or part else name


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
        print(listing())
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
