"""The load generator `guidellm`, for a few seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.support import COUNT_SHAPES, MODEL, READ_SIGN, ROOT, Server

pytest.importorskip("guidellm")
pytest.importorskip("torch", reason="guidellm loads its data with torch, which is not installed here")

ANSWERS = {"model": MODEL, "max_tokens": 16}
SECONDS = 4
LIMIT_SECONDS = 120


def measure(server: Server, folder: Path, route: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The report about two streams of questions at a time, for some seconds."""
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options: list[tuple[str, dict[str, Any]]] = [
        ("backend", {"kind": "openai_http", "target": server.url, "request_format": route, **ANSWERS}),
        ("profile", {"kind": "concurrent", "streams": [2]}),
        ("constraint", {"kind": "max_duration", "seconds": SECONDS}),
        ("constraint", {"kind": "max_errors", "count": 1}),
        ("data", {"kind": "json_file", "path": str(folder / "data.jsonl")}),
        ("output", {"kind": "json", "path": str(folder / "report.json")}),
    ]
    words = [f"--{name}={json.dumps(value)}" for name, value in options]
    program = Path(sys.executable).with_name("guidellm")
    done = subprocess.run(
        [program, "run", *words, "--disable-console"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report["benchmarks"][0]


WITH_IMAGES = [
    {"prompt": case.question, "image": str(ROOT / "examples" / case.pictures[0])}
    for case in (COUNT_SHAPES, READ_SIGN)
]
WITHOUT_IMAGES = [{"prompt": "How many circles are there?"}, {"prompt": "List the shapes in the image."}]


@pytest.mark.parametrize(
    ("route", "rows"),
    [
        ("/v1/chat/completions", WITH_IMAGES),
        ("/v1/responses", WITH_IMAGES),
        ("/v1/completions", WITHOUT_IMAGES),
    ],
    ids=["chat", "responses", "completions"],
)
def test_load(server: Server, tmp_path: Path, route: str, rows: list[dict[str, Any]]) -> None:
    """a few seconds of load are measured without an error"""
    report = measure(server, tmp_path, route, rows)
    totals = report["metrics"]["request_totals"]
    assert totals["errored"] == 0
    assert totals["successful"] > 0
    Path("/tmp/gl-report.json").write_text(json.dumps(report))
