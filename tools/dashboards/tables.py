"""The tables of docs/monitoring.md: objectives, recording rules, alerts, and panels of dashboards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fovea.core.settings import settings_of
from fovea.deploy.monitoring.alerts.all import alert_groups
from fovea.deploy.monitoring.recording import recording_groups
from fovea.deploy.monitoring.rule import Alert, Record
from fovea.deploy.monitoring.targets import Targets


def tables(boards: Mapping[str, str]) -> dict[str, str]:
    """Return each table by the name of its place in the page: <!-- table: NAME -->.

    boards: the JSON of the dashboards.
    """
    return {
        "targets": _table(("target", "default", "accepted", "meaning"), _targets()),
        "objectives": _table(("`slo`", "budget", "objective"), _objectives()),
        "dashboards": _table(("dashboard", "row", "panels"), _dashboards(boards)),
        "rules": _table(("series", "labels", "meaning"), _records()),
        "alerts": _table(("alert", "severity", "for", "fires if"), _alerts()),
    }


def fill_tables(page: str, boards: Mapping[str, str]) -> str:
    """Return a page with its tables as they have to be now. boards: the JSON of the dashboards."""
    for name, table in tables(boards).items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, _, rest = page.partition(start)
        page = f"{before}{start}\n{table}\n{end}{rest.partition(end)[2]}"
    return page


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _targets() -> Iterator[Sequence[str]]:
    for entry in settings_of(Targets):
        yield f"`{entry.name}`", f"{entry.default:g}", entry.rule.accepted, entry.rule.help


def _objectives() -> Iterator[Sequence[str]]:
    for each in Targets().objectives():
        yield f"`{each.slo}`", f"{each.budget:g}", each.text


def _dashboards(boards: Mapping[str, str]) -> Iterator[Sequence[str]]:
    for text in boards.values():
        board = json.loads(text)
        rows: dict[str, list[str]] = {}
        for panel in board["panels"]:
            if panel["type"] == "row":
                rows[panel["title"]] = []
                inner: list[Any] = panel.get("panels") or []
                rows[panel["title"]] += [each["title"] for each in inner]
            else:
                rows[next(reversed(rows))].append(panel["title"])
        for row, titles in rows.items():
            yield board["title"], row, "; ".join(titles)


def _records() -> Iterator[Sequence[str]]:
    seen: dict[str, tuple[set[str], str]] = {}
    for group in recording_groups(Targets()):
        for rule in group.rules:
            if isinstance(rule, Record):
                seen.setdefault(rule.name, (set(), rule.text))[0].update(rule.labels)
    for name, (labels, text) in seen.items():
        yield f"`{name}`", ", ".join(f"`{label}`" for label in sorted(labels)), text


def _alerts() -> Iterator[Sequence[str]]:
    for group in alert_groups():
        for rule in group.rules:
            if isinstance(rule, Alert):
                link = f"[{rule.name}](runbooks.md#{rule.anchor})"
                yield link, rule.severity, rule.hold, f"`{rule.expression}`"
