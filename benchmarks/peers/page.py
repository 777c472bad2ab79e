"""The results as a Markdown page and a chart.

    python benchmarks/peers/page.py RESULTS.json

Beside the JSON, with its name.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rows import MEMORY_FACTOR, ROWS, Figure, Row, best_peer, figures, verdicts

WORDS = {True: "met", False: "**missed**", None: "not measured"}


def page(found: Mapping[str, Any]) -> str:
    """found: as run.py writes it."""
    return "\n".join([*_head(found), *(line for at in found["precisions"] for line in _table(found, at)), ""])


def _head(found: Mapping[str, Any]) -> Iterator[str]:
    machine, shape = found["machine"], found["shape"]
    yield "# Fovea beside other engines on one machine"
    yield ""
    yield (
        f"{found['date']}; {machine['cpu']}, {len(machine['cores'])} of {machine['cores_in_all']} cores for the server, "
        f"{machine['memory_gib']:.0f} GiB; {machine['system']}, Python {machine['python']}; commit {machine['commit']}."
    )
    yield ""
    yield (
        f"Random weights in the shape of a 0.5 B Qwen2.5-VL ({found['checkpoint_mib']:.0f} MiB in bf16). Every engine is an "
        f"HTTP server asked by the same client, with the same pictures and words: {shape['visual_tokens']} visual and "
        f"{shape['text_tokens']} text tokens, {shape['output_tokens']} new ones, greedy. Rounds are interleaved, and only "
        f"the engine that is measured runs. Medians of {found['repeats']} (lowest to highest)."
    )
    yield ""
    yield "Reproduce it: `python benchmarks/peers/run.py`."
    if found["repeats"] < 3:
        yield ""
        yield "**A quick run to see that everything works: its figures are not results.**"


def _table(found: Mapping[str, Any], precision: str) -> Iterator[str]:
    part = found["precisions"][precision]
    engines: Mapping[str, Any] = part["engines"]
    running = [name for name, engine in engines.items() if not engine.get("reason")]
    yield ""
    yield f"## {precision}"
    yield ""
    yield "| | " + " | ".join(engines[name]["title"] for name in running) + " | Fovea / best peer | target |"
    yield "|---|" + "---|" * (len(running) + 2)
    limit = _memory_limit(found, engines)
    for row in ROWS:
        values = figures(row, engines)
        if not any(row.workload in engines[name]["rounds"] for name in running):
            continue
        cells = [_cell(values.get(name), engines[name], row) for name in running]
        wanted = "; ".join(f"{v.words}: {WORDS[v.met]}" for v in verdicts(row, precision, values, limit))
        yield (
            f"| {row.title}, {row.unit} | "
            + " | ".join([*cells, _ratio(row, values, engines), wanted])
            + " |"
        )
    yield ""
    for engine in engines.values():
        yield f"- {engine['title']}: {_about(engine)}"
        for workload, why in engine.get("lacks", {}).items():
            yield f"  - not {workload}: {why}"


def _about(engine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in engine.get("versions", {}).items())
    if engine.get("reason"):
        return f"not compared: {engine['reason']}" + (f" ({versions})" if versions else "")
    return (
        f"{versions}; {engine['precision']}; {engine['pools_mib']} MiB of configured caches; answered "
        f"{engine['start_s']:.0f} s after its start"
    )


def _cell(value: Figure | None, engine: Mapping[str, Any], row: Row) -> str:
    if value is not None:
        return f"{number(value.median)} ({number(value.low)} to {number(value.high)})"
    if row.workload in engine.get("lacks", {}):
        return "-"
    reasons = [part["why"] for part in engine["rounds"].get(row.workload, []) if part["failed"]]
    return f"failed: {reasons[0]}" if reasons else "-"


def _ratio(row: Row, values: Mapping[str, Figure], engines: Mapping[str, Any]) -> str:
    peer = best_peer(row, values)
    if peer is None or "fovea" not in values:
        return "-"
    return f"{values['fovea'].median / values[peer].median:.2f}x {engines[peer]['title']}"


def _memory_limit(found: Mapping[str, Any], engines: Mapping[str, Any]) -> float:
    ours = engines.get("fovea", {})
    if "pools_mib" not in ours:
        return math.nan
    return float(MEMORY_FACTOR * found["checkpoint_mib"] + ours["pools_mib"])


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def chart(found: Mapping[str, Any], path: Path) -> None:
    """A panel per row that has figures: bars of every engine and precision."""
    from matplotlib.figure import Figure as Canvas

    parts = found["precisions"].values()
    rows = [row for row in ROWS if any(figures(row, part["engines"]) for part in parts)]
    columns = 3
    canvas = Canvas(figsize=(15, 3.2 * math.ceil(len(rows) / columns)), dpi=110, layout="constrained")
    canvas.suptitle(f"{found['machine']['cpu']}, {len(found['machine']['cores'])} cores, {found['date']}")
    panels = list(canvas.subplots(math.ceil(len(rows) / columns), columns).flat)
    colours = {name: f"C{number}" for number, name in enumerate(_names(found))}
    for panel, row in zip(panels, rows, strict=False):
        bars = [
            (f"{found['precisions'][at]['engines'][name]['title']}, {at}", value, colours[name])
            for at in found["precisions"]
            for name, value in figures(row, found["precisions"][at]["engines"]).items()
        ]
        panel.set_title(f"{row.title}\n{row.unit}, {'less' if row.lower else 'more'} is better", fontsize=9)
        labels, values, colour = zip(*bars, strict=True)
        spread = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
        panel.barh(labels, [v.median for v in values], xerr=spread, color=colour, ecolor="black", capsize=2)
        panel.invert_yaxis()
        panel.tick_params(labelsize=7)
    for panel in panels[len(rows) :]:
        panel.set_axis_off()
    canvas.savefig(path)


def _names(found: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for part in found["precisions"].values() for name in part["engines"]))


def write(found: Mapping[str, Any], results: Path) -> None:
    """The page and the chart beside the JSON."""
    results.with_suffix(".md").write_text(page(found) + f"\n![chart]({results.with_suffix('.png').name})\n")
    chart(found, results.with_suffix(".png"))


if __name__ == "__main__":
    given = Path(sys.argv[1])
    write(json.loads(given.read_text()), given)
