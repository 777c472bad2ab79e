"""The table of results, for the terminal and for benchmarks/results/attack.md."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from innocent import Log
from result import SLACK_S, Result

from fovea.core.markdown import markdown_table

HEAD = (
    "attack", "needs", "innocent: requests", "errors", "text p50 / p99 / worst, ms",
    "image p50 / p99 / worst, ms", "attacker saw", "memory, MiB", "other load", "verdict",
)  # fmt: skip


def table(results: Sequence[Result]) -> str:
    """A Markdown table with one row per attack."""
    return markdown_table(HEAD, map(_row, results), aligned=True)


def _row(result: Result) -> tuple[str, ...]:
    logs = result.innocents
    errors = sum(sum(log.failures.values()) for log in logs.values())
    memory = f"{result.baseline_mib:.0f} -> {result.peak_mib:.0f}" if result.peak_mib else ""
    seen = ", ".join(f"{kind}: {count:,}" for kind, count in result.attacker.most_common(4))
    return (
        result.name, result.needs, f"{sum(len(log.seconds) for log in logs.values())}" if logs else "",
        str(errors) if logs else "", _times(logs.get("text")), _times(logs.get("image")), seen, memory,
        f"{100 * result.other_load:.0f}%" if logs else "", result.verdict,
    )  # fmt: skip


def _times(log: Log | None) -> str:
    if log is None or not log.seconds:
        return ""
    return " / ".join(f"{1000 * seconds:.0f}" for seconds in (log.at(50), log.at(99), log.worst))


def write(
    path: Path, results: Sequence[Result], quiet: dict[str, Log], seconds: float, before: Path | None
) -> None:
    """Write the page of results.

    quiet: logs of the innocent clients without an attack.
    seconds: length of each attack.
    before: JSON of an earlier run, which gets a table of its own; None: there is none.
    """
    calm = ", ".join(f"{kind} {1000 * log.at(99):.0f} ms" for kind, log in quiet.items())
    failed = sum(bool(result.problems) for result in results)
    text = f"""# Attacks on a running server

{datetime.date.today()}, `make attack` at {commit()}: {_processor()}, {_cores()} cores, {platform.system()}.
{len(results)} rows, {failed} failed. The 99th percentile without an attack: {calm}.

Each attack runs for {seconds:g} seconds against a `fovea serve` of its own: the bundled model, API keys, and
the default settings, except where the table of attacks says otherwise. During the attack two innocent
clients with keys of their own ask short questions, one of them about a new small picture each time, with a
new connection for every request. The attacker has another key and 20 other loopback addresses; its process
has a low priority, because on a small machine it takes processor time from the server that a remote attacker
would not take.

An attack passes if no innocent request fails (429 is a failure), none takes longer than twice the 99th
percentile of a quiet server plus {SLACK_S:g} second, the memory of the server's processes stays below the
ceiling (by default 2,048 MiB above its start), and the server answers correctly afterwards.

{table(results)}

"Other load" is the share of the machine's processors that other programs took during the attack: with much of
it, waits tell little. "Memory" is the sum of the resident sizes of the server's processes, before the attack
and at its peak. "held" counts connections that the server kept open to the end of the attack, "closed" those
that it ended without an answer, "refused" those that it did not accept.

{markdown_table(("attack", "what the attacker does"), [(each.name, each.story) for each in results])}
"""
    if before is not None:
        text += _earlier(json.loads(before.read_text()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _earlier(run: dict[str, Any]) -> str:
    """The section about an earlier run."""
    head = ("attack", "errors", "text worst, ms", "image worst, ms", "memory, MiB", "verdict")
    rows = []
    for row in run["results"]:
        logs = row["innocents"]
        errors = sum(sum(log["failures"].values()) for log in logs.values()) if logs else ""
        worst = [f"{1000 * logs[kind]['worst_s']:.0f}" if logs else "" for kind in ("text", "image")]
        memory = f"{row['baseline_mib']:.0f} -> {row['peak_mib']:.0f}" if row["peak_mib"] else ""
        verdict = row["verdict"].split(":")[0]
        rows.append((row["name"], str(errors), *worst, memory, verdict))
    story = f"The same attacks at {run['commit']}, on the same machine, with other work on it:"
    return f"\n## Before\n\n{story}\n\n{markdown_table(head, rows)}\n"


def commit() -> str:
    """The commit of the working tree, shortened."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "an unknown commit"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0))
