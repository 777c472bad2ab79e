"""Results as text for people, as a JSON object for programs, and compared with those of another run."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fovea.bench.measure import Spread, plain
from fovea.bench.run import Result
from fovea.bench.sla import Verdict
from fovea.core.errors import ConfigError

VERSION = 1
"""Of the JSON object; another one has other names in it."""
ROWS = (
    ("TTFT", "ttft"),
    ("gap", "gap"),
    ("longest gap", "longest_gap"),
    ("per token", "tpot"),
    ("end to end", "end_to_end"),
)
COLUMNS = ("p50", "p90", "p95", "p99", "longest")
COMPARED = (
    ("ttft", "p50"), ("ttft", "p95"), ("gap", "p50"), ("gap", "p99"), ("end_to_end", "p50"), ("end_to_end", "p95"),
    ("tokens_per_s", None), ("decode_per_s", None), ("requests_per_s", None), ("goodput", None), ("values", "stall_ms"),
)  # fmt: skip


def machine() -> dict[str, str]:
    """Where the load generator ran."""
    return {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}


def requests_of(result: Result) -> list[dict[str, Any]]:
    """A row per request: seconds from the start of its round, milliseconds for what it took."""
    rows = []
    for number, part in enumerate(result.rounds):
        start = min((sample.scheduled for sample in part.samples), default=0.0)
        for sample in part.samples:
            rows.append(
                {
                    "round": number,
                    "class": sample.label,
                    "due_s": sample.scheduled - start,
                    "late_ms": sample.late * 1e3,
                    "ttft_ms": sample.ttft * 1e3,
                    "end_to_end_ms": sample.end_to_end * 1e3,
                    "longest_gap_ms": max(sample.gaps, default=math.nan) * 1e3,
                    "tokens": sample.output,
                    "error": sample.failure.kind if sample.failure else None,
                }
            )
    return [plain(row) for row in rows]


def block(result: Result) -> str:
    """A result as lines for a terminal."""
    return "\n".join([f"{result.name}: {result.title}", *(f"  {line}" for line in _lines(result))])


def _lines(result: Result) -> Iterator[str]:
    summary = result.summary
    yield (
        f"{summary.requests} requests in {summary.seconds:.1f} s, {summary.failed} failed; "
        f"{_number(summary.tokens_per_s)} tokens/s ({_number(summary.tokens_per_s_low)} to "
        f"{_number(summary.tokens_per_s_high)}), {_number(summary.requests_per_s)} requests/s; "
        f"decode: {_number(summary.decode_per_s)} tokens/s; good: {summary.good:.1%}, {_number(summary.goodput)} requests/s"
    )
    yield " " * 26 + "".join(f"{column:>10}" for column in COLUMNS)
    yield from (_row(f"{name} ms", getattr(summary, field)) for name, field in ROWS)
    for label, part in result.classes.items():
        yield _row(f"TTFT ms, {label}", part.ttft)
    for name, value in summary.values.items():
        yield f"{name:<26}{_number(value):>10}"
    for kind, (count, words) in summary.errors.items():
        yield f"error: {count} x {kind}; the first: {words}"
    yield from (f"note: {note}" for note in result.notes)
    yield from map(_verdict, result.verdicts)


def _row(name: str, spread: Spread) -> str:
    return f"{name:<26}" + "".join(f"{_number(getattr(spread, column)):>10}" for column in COLUMNS)


def _verdict(verdict: Verdict) -> str:
    word = {True: "met", False: "MISSED", None: "not tested"}[verdict.met]
    sign = "at most" if verdict.at_most else "at least"
    return f"{word:<14}{verdict.name:<22}{_number(verdict.value):>10}   {sign} {verdict.limit:g}"


def _number(value: float) -> str:
    """Three digits that matter, at most two behind the point."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def read_document(path: Path) -> dict[str, Any]:
    """A file of --out, or the last line of a run. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can not be read: {error}", param="against") from error
    for candidate in (text, text.rstrip().rpartition("\n")[2]):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(found, dict) and found.get("fovea_bench") == VERSION:
            return found
    raise ConfigError(f"{path} holds no results of fovea bench (format {VERSION})", param="against")


def compare(new: Mapping[str, Any], old: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Lines for people, and (workload, what, old, new, ratio new to old) of what both have measured."""
    rows = []
    before = {result["name"]: result["summary"] for result in old["results"]}
    for result in new["results"]:
        for field, share in COMPARED if result["name"] in before else ():
            pair = [_picked(summary, field, share) for summary in (before[result["name"]], result["summary"])]
            if pair[0] and pair[1] is not None:
                name = f"{field} {share}" if share and field != "values" else share or field
                rows.append(
                    {
                        "workload": result["name"],
                        "what": name,
                        "old": pair[0],
                        "new": pair[1],
                        "ratio": pair[1] / pair[0],
                    }
                )
    lines = [f"{'':<32}{'old':>10}{'new':>10}{'new/old':>10}"]
    lines += [
        f"{row['workload'] + ', ' + row['what']:<32}{_number(row['old']):>10}{_number(row['new']):>10}{row['ratio']:>9.2f}x"
        for row in rows
    ]
    if not rows:
        lines = ["the two runs have no workload in common"]
    differing = [
        name
        for name, value in new["settings"].items()
        if old["settings"].get(name) != value and name != "nonce"
    ]
    if differing:
        lines.append(f"note: the two runs differ in {', '.join(differing)}")
    return lines, rows


def _picked(summary: Mapping[str, Any], field: str, share: str | None) -> Any:
    value = summary.get(field)
    return value.get(share) if share and isinstance(value, Mapping) else value
