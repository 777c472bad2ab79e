"""Write the results as a Markdown page and a chart.

    python benchmarks/peers/page.py RESULTS.json

Both files get the name and folder of the JSON file.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from instructions import ALL, AMX, AVX2
from rows import MEMORY_FACTOR, ROWS, Figure, Row, best_peer, figures, verdicts
from sampling import BEYOND, MATRIX, OTHER, VECTOR

from fovea.core.markdown import markdown_table

TITLES = {
    ALL: "Fovea beside other engines on one machine",
    AVX2: "Fovea beside other engines on a machine with AVX2 and without AVX-512",
    AMX: "Fovea beside other engines on a machine with AMX",
}
PRECISIONS = ("bf16", "int8", "int4")
WORDS = {True: "met", False: "**missed**", None: "not measured"}


def page(results: Mapping[str, Any]) -> str:
    """The page. results: as run.py writes them."""
    tables = (line for precision in _in_order(results) for line in _table(results, precision))
    return "\n".join([*_head(results), *tables, ""])


def _in_order(results: Mapping[str, Any]) -> list[str]:
    """The precisions, in the usual order, whatever the order in which they were measured."""
    return sorted(results["precisions"], key=PRECISIONS.index)


def _head(results: Mapping[str, Any]) -> Iterator[str]:
    machine, shape = results["machine"], results["shape"]
    instructions = results.get("instructions", ALL)
    yield f"# {TITLES[instructions]}"
    yield ""
    yield (
        f"{results['date']}; {machine['cpu']}, {len(machine['cores'])} of {machine['cores_in_all']} cores "
        f"for the server, {machine['memory_gib']:.0f} GiB; {machine['system']}, Python {machine['python']}; "
        f"commit {machine['commit']}."
    )
    yield ""
    yield (
        "The weights are random, in the shape of a 0.5 B Qwen2.5-VL "
        f"({results['checkpoint_mib']:.0f} MiB in bf16). Every engine is an HTTP server, and the same client "
        "sends all of them the same images and texts. A prompt has "
        f"{shape['visual_tokens']} visual and {shape['text_tokens']} text tokens; {shape['output_tokens']} "
        "tokens are generated greedily. Rounds are interleaved, and only the engine that is measured runs. "
        f"Figures are medians of {results['repeats']} rounds (lowest to highest)."
    )
    yield ""
    if results.get("limited"):
        yield (
            "This machine also has AVX-512. The switches named below the tables keep every engine from "
            "AVX-512, AVX-VNNI and AMX. As a check, the page counts which instructions the threads of an "
            "engine were at when they were stopped at arbitrary times in the rounds that warm up."
        )
        yield ""
    flags = "" if instructions == ALL else f" --instructions {instructions}"
    yield f"To reproduce: `python benchmarks/peers/run.py{flags}`."
    if results["repeats"] < 3:
        yield ""
        yield "**This was a quick run to check that everything works: its figures are not results.**"


def _table(results: Mapping[str, Any], precision: str) -> Iterator[str]:
    part = results["precisions"][precision]
    engines: Mapping[str, Any] = part["engines"]
    running = [name for name, engine in engines.items() if not engine.get("reason")]
    yield ""
    yield f"## {precision}"
    yield ""
    if part.get("commit", results["machine"]["commit"]) != results["machine"]["commit"]:
        yield f"Measured on {part['date']} at commit {part['commit']}."
        yield ""
    head = ("", *(engines[name]["title"] for name in running), "Fovea / best peer", "target")
    rows = []
    limit = _memory_limit(results, engines)
    for row in ROWS:
        values = figures(row, engines)
        if not any(row.workload in engines[name]["rounds"] for name in running):
            continue
        cells = [_cell(values.get(name), engines[name], row) for name in running]
        judged = verdicts(row, precision, values, limit, results.get("instructions", ALL))
        targets = "; ".join(f"{v.words}: {WORDS[v.met]}" for v in judged)
        rows.append((f"{row.title}, {row.unit}", *cells, _ratio(row, values, engines), targets))
    yield markdown_table(head, rows)
    yield ""
    for engine in engines.values():
        yield f"- {engine['title']}: {_about(engine)}"
        yield from _kept(engine)
        for workload, why in engine.get("lacks", {}).items():
            yield f"  - `{workload}` was not measured: {why}"


def _about(engine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in engine.get("versions", {}).items())
    if engine.get("reason"):
        return f"not compared: {engine['reason']}" + (f" ({versions})" if versions else "")
    return (
        f"{versions}; {engine['precision']}; {engine['pools_mib']} MiB of configured caches; first answer "
        f"{engine['start_s']:.0f} s after the start"
    )


def _kept(engine: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines on how an engine is kept to an instruction set, and on what instructions it executed."""
    if engine.get("limit"):
        yield f"  - kept to AVX2 by {engine['limit']}"
    kinds = engine.get("instructions", {}).get("kinds")
    if kinds:
        names = (*((MATRIX,) if MATRIX in kinds else ()), BEYOND, VECTOR, OTHER)
        counts = ", ".join(f"{kinds.get(name, 0)} {name}" for name in names)
        files = ", ".join(engine["instructions"]["beyond_in"])
        yield f"  - of {sum(kinds.values())} sampled instructions: {counts}" + (files and f" (in {files})")


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


def _memory_limit(results: Mapping[str, Any], engines: Mapping[str, Any]) -> float:
    ours = engines.get("fovea", {})
    if "pools_mib" not in ours:
        return math.nan
    return float(MEMORY_FACTOR * results["checkpoint_mib"] + ours["pools_mib"])


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def chart(results: Mapping[str, Any], path: Path) -> None:
    """Draw one panel per row that has figures, with a bar for every engine and precision."""
    from matplotlib.figure import Figure as Canvas

    parts = results["precisions"].values()
    rows = [row for row in ROWS if any(figures(row, part["engines"]) for part in parts)]
    columns = 3
    canvas = Canvas(figsize=(15, 3.2 * math.ceil(len(rows) / columns)), dpi=110, layout="constrained")
    machine = results["machine"]
    limited = ", AVX2 only" if results.get("limited") else ""
    canvas.suptitle(f"{machine['cpu']}, {len(machine['cores'])} cores{limited}, {results['date']}")
    panels = list(canvas.subplots(math.ceil(len(rows) / columns), columns).flat)
    colours = {name: f"C{number}" for number, name in enumerate(_names(results))}
    for panel, row in zip(panels, rows, strict=False):
        bars = [
            (f"{part['engines'][name]['title']}, {precision}", value, colours[name])
            for precision in _in_order(results)
            for part in [results["precisions"][precision]]
            for name, value in figures(row, part["engines"]).items()
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


def _names(results: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for part in results["precisions"].values() for name in part["engines"]))


def write(results: Mapping[str, Any], path: Path) -> None:
    """Write the page and the chart beside the JSON file at `path`."""
    path.with_suffix(".md").write_text(page(results) + f"\n![chart]({path.with_suffix('.png').name})\n")
    chart(results, path.with_suffix(".png"))


if __name__ == "__main__":
    source = Path(sys.argv[1])
    write(json.loads(source.read_text()), source)
