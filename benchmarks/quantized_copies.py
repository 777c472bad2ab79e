"""Compare quantized copies of a model: size, right answers by kind of question, and speed of decodes.

    python benchmarks/quantized_copies.py [--count 200] [--folder PATH] [--copies none,int4,...]

It writes each copy with `fovea quantize`, asks it questions about generated scenes with `fovea eval`, and
decodes one answer on one thread. Speed is in tokens per second of processor time, so that other processes on
the machine disturb it little. Results are kept in the folder, so a run that was stopped continues. The last
lines are a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from fovea import Engine
from fovea.core.markdown import markdown_table
from fovea.core.names import bundled_model

MODEL = "fovea-tiny"
CALIBRATED = ("--calibrate", "scenes")
COPIES: dict[str, tuple[str, ...]] = {
    "none": (),
    "int8": ("--to", "int8", *CALIBRATED),
    "int4, data-free": ("--to", "int4"),
    "int4": ("--to", "int4", *CALIBRATED),
    "fp8": ("--to", "fp8", *CALIBRATED),
    "tower int8": ("--to", "tower=int8,projector=int8", *CALIBRATED),
    "tower int4": ("--to", "tower=int4,projector=int4", *CALIBRATED),
}
"""Flags of `fovea quantize` for each copy; empty: the model itself."""
TOKENS, REPEATS = 64, 5
FOVEA = (sys.executable, "-c", "import sys; from fovea.cli.main import main; sys.exit(main(sys.argv[1:]))")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="questions of each kind (default: 200)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/fovea-bench/copies"))
    parser.add_argument("--copies", default=",".join(COPIES).replace("int4, data", "int4; data"))
    args = parser.parse_args()
    names = [name.replace(";", ",") for name in args.copies.split(",")]
    args.folder.mkdir(parents=True, exist_ok=True)
    results = {name: result(name, args.folder, args.count) for name in names}
    print(table(results))


def result(name: str, folder: Path, count: int) -> dict[str, object]:
    """Return the figures of a copy, which is written if it is missing."""
    stem = name.replace(", ", "-").replace(" ", "-")
    model, kept = folder / stem, folder / f"{stem}-{count}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    flags = COPIES[name]
    if flags and not (model / "config.json").exists():
        subprocess.run([*FOVEA, "quantize", MODEL, *flags, "--out", str(model)], check=True)
    source = str(model) if flags else MODEL
    asked = subprocess.run(
        [*FOVEA, "eval", source, "--count", str(count), "--json"], check=True, stdout=subprocess.PIPE
    )
    rows = {row["kind"]: (row["correct"], row["cases"]) for row in json.loads(asked.stdout)["rows"]}
    files = (model if flags else bundled_model()).glob("*.safetensors")
    found: dict[str, object] = {
        "component": "tower, projector" if "tower" in name else "decoder" if flags else "-",
        "bytes": sum(file.stat().st_size for file in files),
        "rows": rows,
        "rate": decode_rate(source),
    }
    kept.write_text(json.dumps(found))
    print(f"{name}: {found}", flush=True)
    return found


def decode_rate(source: str) -> float:
    """Return the tokens of one answer per second of processor time, the median of some repeats."""
    rates = []
    with Engine.from_pretrained(source, threads=1) as engine:
        for number in range(REPEATS + 1):
            started = time.process_time()
            engine.generate(f"question {number}", max_tokens=1, ignore_eos=True)
            first = time.process_time()
            engine.generate(f"question {number}", max_tokens=TOKENS + 1, ignore_eos=True)
            both = time.process_time() - first - (first - started)
            rates.append(TOKENS / both)
    return statistics.median(rates[1:])


def table(results: dict[str, dict[str, object]]) -> str:
    kinds = list(dict.fromkeys(kind for found in results.values() for kind in found["rows"]))  # type: ignore[attr-defined]
    lines = [
        ["component", *(str(found["component"]) for found in results.values())],
        ["size", *(f"{found['bytes'] / 1e6:.1f} MB" for found in results.values())],  # type: ignore[operator]
    ]
    for kind in kinds:
        cells = [found["rows"][kind] for found in results.values()]  # type: ignore[index]
        lines.append([kind, *(f"{correct} / {cases}" for correct, cases in cells)])
    rates = [float(found["rate"]) for found in results.values()]  # type: ignore[arg-type]
    lines.append(["tokens/s, one thread", *(f"{rate:.0f}" for rate in rates)])
    return markdown_table(("", *results), lines)


if __name__ == "__main__":
    main()
