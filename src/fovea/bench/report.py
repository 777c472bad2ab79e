"""Results as text for people, as JSON for programs, and in comparison with an earlier run."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fovea.bench.measure import Spread, without_nan
from fovea.bench.run import WorkloadResult
from fovea.bench.sla import Verdict
from fovea.core.errors import ConfigError

VERSION = 1
"""Version of the JSON format. It changes when names in the JSON object change."""
ROWS = (
    ("TTFT", "ttft"),
    ("gap", "gap"),
    ("longest gap", "longest_gap"),
    ("per token", "tpot"),
    ("end to end", "end_to_end"),
)
COLUMNS = ("p50", "p90", "p95", "p99", "longest")
COMPARED = (
    ("ttft", "p50"), ("ttft", "p95"), ("gap", "p50"), ("gap", "p99"),
    ("end_to_end", "p50"), ("end_to_end", "p95"),
    ("tokens_per_s", None), ("decode_per_s", None), ("requests_per_s", None), ("goodput", None),
    ("values", "stall_ms"),
)  # fmt: skip


def machine() -> dict[str, str]:
    """The Python version and the machine of the load generator."""
    return {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}


def request_rows(result: WorkloadResult) -> list[dict[str, Any]]:
    """One row per request: due_s in seconds from the start of its round, all durations in milliseconds."""
    rows = []
    for number, part in enumerate(result.rounds):
        start = min((sample.due_at for sample in part.samples), default=0.0)
        for sample in part.samples:
            rows.append(
                {
                    "round": number,
                    "class": sample.label,
                    "due_s": sample.due_at - start,
                    "late_ms": sample.send_delay * 1e3,
                    "ttft_ms": sample.ttft * 1e3,
                    "end_to_end_ms": sample.end_to_end * 1e3,
                    "longest_gap_ms": max(sample.gaps, default=math.nan) * 1e3,
                    "tokens": sample.output_tokens,
                    "error": sample.failure.kind if sample.failure else None,
                }
            )
    return [without_nan(row) for row in rows]


def format_result(result: WorkloadResult) -> str:
    """A result as text for a terminal, several lines long."""
    return "\n".join([f"{result.name}: {result.title}", *(f"  {line}" for line in _lines(result))])


def _lines(result: WorkloadResult) -> Iterator[str]:
    summary = result.summary
    noun = "request" if summary.requests == 1 else "requests"
    yield (
        f"{summary.requests} {noun} in {summary.seconds:.1f} s, {summary.failed} failed; "
        f"{_number(summary.tokens_per_s)} tokens/s ({_number(summary.tokens_per_s_low)} to "
        f"{_number(summary.tokens_per_s_high)}), {_number(summary.requests_per_s)} requests/s; "
        f"decode: {_number(summary.decode_per_s)} tokens/s; "
        f"good: {summary.good:.1%}, {_number(summary.goodput)} requests/s"
    )
    yield " " * 26 + "".join(f"{column:>10}" for column in COLUMNS)
    yield from (_row(f"{name} ms", getattr(summary, field)) for name, field in ROWS)
    for label, part in result.classes.items():
        yield _row(f"TTFT ms, {label}", part.ttft)
    for name, value in summary.values.items():
        yield f"{name:<26}{_number(value):>10}"
    for kind, (count, message) in summary.errors.items():
        yield f"error: {count} x {kind}; the first: {message}"
    yield from (f"note: {note}" for note in result.notes)
    yield from map(_verdict, result.verdicts)


def _row(name: str, spread: Spread) -> str:
    return f"{name:<26}" + "".join(f"{_number(getattr(spread, column)):>10}" for column in COLUMNS)


def _verdict(verdict: Verdict) -> str:
    word = {True: "met", False: "MISSED", None: "not tested"}[verdict.met]
    sign = "at most" if verdict.at_most else "at least"
    return f"{word:<14}{verdict.name:<22}{_number(verdict.value):>10}   {sign} {verdict.limit:g}"


def _number(value: float) -> str:
    """A number as short text; "-" for nan.

    It has three significant digits below 10, one decimal below 1000, and no decimals from 1000 on.
    """
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def read_results(path: Path) -> dict[str, Any]:
    """Read the results of an earlier run from a file of --out, or from a file that holds the output of a run.

    Raises ConfigError if the file cannot be read or holds no results of this VERSION.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="against") from error
    for candidate in (text, text.rstrip().rpartition("\n")[2]):
        try:
            results = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(results, dict) and results.get("fovea_bench") == VERSION:
            return results
    raise ConfigError(f"{path} holds no results of fovea bench (format {VERSION})", param="against")


def compare(new: Mapping[str, Any], old: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Compare two runs by the figures that both have measured.

    new, old: results as `SessionResult.as_dict` writes them.
    Returns lines for people, and one row per figure: workload, what, old, new, ratio (new to old).
    """
    rows = []
    before = {result["name"]: result["summary"] for result in old["results"]}
    for result in new["results"]:
        for field, key in COMPARED if result["name"] in before else ():
            values = [_figure(summary, field, key) for summary in (before[result["name"]], result["summary"])]
            if values[0] and values[1] is not None:
                name = f"{field} {key}" if key and field != "values" else key or field
                rows.append(
                    {
                        "workload": result["name"],
                        "what": name,
                        "old": values[0],
                        "new": values[1],
                        "ratio": values[1] / values[0],
                    }
                )
    lines = [f"{'':<32}{'old':>10}{'new':>10}{'new/old':>10}"]
    lines += [
        f"{row['workload'] + ', ' + row['what']:<32}"
        f"{_number(row['old']):>10}{_number(row['new']):>10}{row['ratio']:>9.2f}x"
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


def _figure(summary: Mapping[str, Any], field: str, key: str | None) -> Any:
    value = summary.get(field)
    return value.get(key) if key and isinstance(value, Mapping) else value
