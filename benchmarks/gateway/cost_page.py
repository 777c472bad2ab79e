"""The tables of the comparison as Markdown."""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_rows import DIRECT, TARGETS, Row
from payloads import KINDS

from fovea.core.markdown import markdown_table

numbers_table = functools.partial(markdown_table, numbers=True)


@dataclass(frozen=True)
class Footprint:
    """Processes of a proxy over the whole run.

    title, version, settings: from its description.
    before_mib, after_mib: resident memory after the warm-up, and at the end.
    idle_ms: processor time per second in which no request came, in milliseconds.
    """

    title: str
    version: str
    settings: str
    processes: int
    threads: int
    before_mib: float
    after_mib: float
    idle_ms: float


def tables(rows: Sequence[Row], footprints: Mapping[str, Footprint], missing: Mapping[str, str]) -> str:
    """All tables, one below the other. missing: for each proxy that could not run, the reason."""
    titles = {DIRECT: "direct", **{name: footprint.title for name, footprint in footprints.items()}}
    parts = []
    for kind in dict.fromkeys(row.kind for row in rows):
        parts += [f"## {KINDS[kind].title}", _kind_table([r for r in rows if r.kind == kind], titles)]
    parts += ["## Processes", _footprints(footprints), "## Targets of the gateway", _targets(rows, titles)]
    parts += [f"Not measured: {name} ({why})." for name, why in missing.items()]
    failed = [row for row in rows if row.errors]
    parts += [f"Failed requests: {titles[row.proxy]}, {row.kind}: {row.errors}." for row in failed]
    return "\n\n".join(parts)


def _kind_table(rows: Sequence[Row], titles: Mapping[str, str]) -> str:
    lines = []
    for row in rows:
        is_direct = row.proxy == DIRECT
        lines.append([
            titles[row.proxy],
            "-" if is_direct else f"{row.cpu_open_ms:.3f}",
            "-" if is_direct else f"{row.cpu_ms:.3f} ({row.cpu_spread[0]:.3f} to {row.cpu_spread[1]:.3f})",
            f"{row.per_s:,.0f}" + ("" if row.is_limit or is_direct else " \\*"),
            "-" if is_direct else f"{row.busy:.0%}",
            "-" if is_direct else f"{row.per_core_s:,.0f}",
            f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}", "-" if is_direct else f"{row.added_ms:+.2f}",
        ])  # fmt: skip
    return numbers_table(
        (
            "proxy", "CPU ms", "CPU ms, closed loop", "requests/s", "of its core", "requests/s by CPU",
            "p50 ms", "p99 ms", "p50 added ms",
        ),
        lines,
    )  # fmt: skip


def _footprints(footprints: Mapping[str, Footprint]) -> str:
    lines = [
        [
            f"{f.title} {f.version}", str(f.processes), str(f.threads), f"{f.before_mib:.0f}",
            f"{f.after_mib:.0f}", f"{f.idle_ms:.2f}", f.settings,
        ]
        for f in footprints.values()
    ]  # fmt: skip
    head = ("proxy", "processes", "threads", "MiB before", "MiB after", "idle CPU ms/s", "settings")
    return numbers_table(head, lines)


def _targets(rows: Sequence[Row], titles: Mapping[str, str]) -> str:
    proxies = [name for name in titles if name != DIRECT]
    lines = []
    for target in TARGETS:
        by_proxy = {row.proxy: row for row in rows if row.kind == target.kind}
        cells = []
        for name in proxies:
            row = by_proxy.get(name)
            value = f"{getattr(row, target.figure):,.{0 if target.at_least else 2}f}" if row else "-"
            cells.append(f"{value}{'' if row is None or target.met(row) else ' (missed)'}")
        lines.append([target.words, *cells])
    return numbers_table(("target", *(titles[name] for name in proxies)), lines)


def machine() -> str:
    """The processor, the system and the source, in one line."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        f"{names[0] if names else platform.machine()}, {len(names)} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}, commit {commit.stdout.strip() or 'unknown'}"
    )


PAGE = """# The cost of a proxy in front of engines

`python benchmarks/gateway/cost.py{options} --page {file}`, {machine}.

The same requests go through each proxy to two simulated engines that answer at once. A proxy runs on core
{proxy_core}; the load generator and the engines are on core {load_core}. Rounds are interleaved: in each of
{rounds} rounds, each kind of request is sent through one proxy after the other, for {seconds} s in a closed
loop and for {seconds} s at a fixed rate. Figures are medians of the rounds. {note}

- CPU ms: processor time, user and system, of all processes of the proxy for each request, at the fixed rate
  and in the closed loop (lowest and highest round). In the closed loop, requests share the cost of waking
  up. The kernel's work on the loopback interface counts for the process that sends.
- requests/s: in the closed loop, with the share of its core that the proxy used. Below {busy:.0%} (\\*)
  something else limited the rate: the core of the load generator and the engines, or other programs. "By
  CPU" is what fits on a core if the proxy has it for itself, from the CPU ms of the closed loop.
- p50, p99: latency of whole answers at the fixed rate, and how much more that is than without a proxy in
  the same round. For the stream with pauses, most of the latency is the engines'
  timers, which vary by some milliseconds.
- The two ways to measure processor time (the clocks of processes, the ticks in /proc) differed by
  {differ:.0f} ms at most; each process may differ by two ticks, 20 ms.

{tables}
"""
