"""benchmarks/fleet.py: predictions for a cluster, and parts of the page at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> str:
    command = [sys.executable, "benchmarks/fleet.py", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300).stdout


def test_the_load_of_a_cluster_is_predicted(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    words = ("--predict-cluster", "--replicas", "3", "--rate", "30")
    written = run(*words, "--requests", "200", "--save-trace", str(trace))
    assert written == run(*words, "--trace", str(trace))
    figures = json.loads(written.splitlines()[-1])
    assert figures["requests"] == sum(figures["outcomes"].values()) == 200
    assert len(trace.read_text().splitlines()) == 200


def test_parts_print_tables_and_keep_results(tmp_path: Path) -> None:
    kept = tmp_path / "results.json"
    printed = run("--only", "rack", "--requests", "60", "--json", str(kept))
    assert "| cache-affine |" in printed
    results = json.loads(kept.read_text())
    assert results["rack"]["events"]["timeline"][0]["replicas"] == 40
