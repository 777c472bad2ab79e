"""The tables of `fovea metrics`: every metric, and the names of other systems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fovea.gateway import metrics as gateway
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


def markdown() -> str:
    """Return the three tables: of the server, of the gateway, and of other systems."""
    titles = ("name", "type", "labels", "unit", "meaning", "vLLM's names", "names of the documents")
    server = [
        (_code(row.name), row.kind, _codes(row.labels), row.unit, row.text,
         _codes(row.alias_names(of_documents=False)), _codes(row.alias_names(of_documents=True)))
        for row in server_rows()
    ]  # fmt: skip
    gateways = [(_code(row.name), row.kind, _codes(row.labels), row.unit, row.text) for row in gateway_rows()]
    return "\n\n".join(
        (
            "### Of a server\n\n" + _table(titles, server),
            "### Of a gateway\n\n" + _table(titles[:5], gateways),
            "### Names of other systems\n\n" + _table(("name", "of", "here", "note"), _translations()),
        )
    )


def _translations() -> list[tuple[str, ...]]:
    """Names of other systems: exported ones first, then those that a query replaces."""
    kinds = {row.name.removesuffix("_total").removeprefix("fovea:"): row for row in server_rows()}
    rows: list[tuple[str, ...]] = []
    for alias in ALIASES:
        row = kinds[alias.of]
        part = f'{{{row.labels[0]}="{alias.value}"}}' if alias.value else ""
        times = f"{alias.scale:g} * " if alias.scale != 1 else ""
        name = _exported(alias.name, row.kind)
        rows.append((_code(name), alias.source, _code(times + row.name + part), "exported"))
    rows += [(_code(one.name), one.system, _code(one.query), one.note) for one in FOREIGN]
    return rows


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join(lines)


def _codes(names: tuple[str, ...]) -> str:
    return ", ".join(map(_code, names))


def _code(name: str) -> str:
    return f"`{name}`" if name else ""
