"""Fuzz all targets one after the other: `python -m tests.fuzz.run [--seconds 600] [--only NAME]`.

Findings are written to out/fuzz/, with the input in one file and the reason beside it. The exit status is 1
if there are any. A finding that is repaired becomes a file of tests/fuzz/corpus/NAME/, which the default
tests replay.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from fovea.core.markdown import markdown_table
from tests.fuzz.table import NAMES

FOLDER = Path("out/fuzz")
GRACE_S, RESTARTS = 60.0, 5


@dataclass
class Row:
    """The result of one target.

    runs: number of inputs.
    corpus: number of inputs that reached something new.
    edges: covered edges of the code; 0: not measured.
    findings: number of findings by kind.
    """

    name: str
    runs: int = 0
    corpus: int = 0
    edges: int = 0
    findings: dict[str, int] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="for all targets together (default: 600)"
    )
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME", help="may be repeated")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for findings (default: {FOLDER})")
    args = parser.parse_args()
    names = args.only or NAMES
    guided = importlib.util.find_spec("atheris") is not None
    print(
        "guided by coverage (atheris)"
        if guided
        else "atheris is not installed: inputs are not guided by coverage"
    )
    rows = []
    for name in names:
        rows.append(fuzz(name, args.seconds / len(names), args.folder))
        print(_line(rows[-1]), flush=True)
    print("\n" + table(rows))
    return 1 if any(row.findings for row in rows) else 0


def fuzz(name: str, seconds: float, folder: Path) -> Row:
    """Fuzz one target. A process that an input kills is started again for the rest of the time."""
    row = Row(name)
    for _ in range(RESTARTS):
        command = [sys.executable, "-m", "tests.fuzz.worker", name, str(seconds), str(folder)]
        try:
            ended = subprocess.run(command, capture_output=True, timeout=seconds + GRACE_S, check=False)
        except subprocess.TimeoutExpired:
            _keep_running(row, folder, "it hangs")
            break
        _add(row, folder, ended.stderr.decode(errors="replace"))
        if ended.returncode == 0:
            break
        _keep_running(row, folder, f"the process ended with {ended.returncode}", ended.stderr[-3000:])
        seconds /= 2
    (folder / f"{name}.running").unlink(missing_ok=True)
    return row


def _add(row: Row, folder: Path, errors: str) -> None:
    """Add what a worker reported."""
    found = [int(number) for number in re.findall(r"cov: (\d+)", errors)]
    row.edges = max([row.edges, *found])
    kept = folder / "corpus" / row.name
    row.corpus = len(list(kept.iterdir())) if kept.is_dir() else 0
    report = folder / f"{row.name}.json"
    if not report.exists():
        return
    figures = json.loads(report.read_text())
    report.unlink()
    row.runs += figures["runs"]
    for kind, count in figures["findings"].items():
        row.findings[kind] = row.findings.get(kind, 0) + count


def _keep_running(row: Row, folder: Path, reason: str, errors: bytes = b"") -> None:
    """Turn the input that ran when the process ended into a finding."""
    row.findings[reason] = row.findings.get(reason, 0) + 1
    running = folder / f"{row.name}.running"
    name = f"{row.name}-killed-{sum(row.findings.values())}"
    if running.exists():
        running.rename(folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_bytes(reason.encode() + b"\n\n" + errors)


def _line(row: Row) -> str:
    edges = f", {row.edges} edges" if row.edges else ""
    return f"{row.name}: {row.runs:,} runs{edges}, {row.corpus} inputs kept, {len(row.findings)} findings"


def table(rows: list[Row]) -> str:
    """A Markdown table with one row per target."""
    lines = []
    for row in rows:
        kinds = "; ".join(f"{count} x {kind}" for kind, count in row.findings.items()) or "none"
        lines.append((row.name, f"{row.runs:,}", str(row.edges or ""), str(row.corpus), kinds))
    return markdown_table(("target", "runs", "edges", "corpus", "findings"), lines)


if __name__ == "__main__":
    sys.exit(main())
