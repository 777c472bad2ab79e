"""The load generator `guidellm`, for a few seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.clients.support import COUNT_SHAPES, MODEL, READ_SIGN, ROOT, Server

pytest.importorskip("guidellm")
pytest.importorskip("torch", reason="guidellm loads its data with torch, which is not installed here")

ANSWERS = {"model": MODEL, "max_tokens": 16}
SECONDS = 4
REPEATS = 500
LIMIT_SECONDS = 60


def measure(server: Server, folder: Path, route: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The report about two streams of questions at a time, for some seconds."""
    lines = [json.dumps(row) + "\n" for row in rows] * REPEATS
    (folder / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    options: list[tuple[str, dict[str, Any]]] = [
        ("backend", {"kind": "openai_http", "target": server.url, "request_format": route, **ANSWERS}),
        ("profile", {"kind": "concurrent", "streams": [2]}),
        ("constraint", {"kind": "max_duration", "seconds": SECONDS}),
        ("constraint", {"kind": "max_errors", "count": 1}),
        ("data", {"kind": "json_file", "path": str(folder / "data.jsonl")}),
        ("output", {"kind": "json", "path": str(folder / "report.json")}),
    ]
    words = [f"--{name}={json.dumps(value)}" for name, value in options]
    with open(folder / "log.txt", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("guidellm"), "run", *words, "--disable-console"],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(LIMIT_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        assert status == 0, log.read()
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report["benchmarks"][0]


CASES = (COUNT_SHAPES, READ_SIGN)
WITH_IMAGES = [
    {"prompt": case.question, "image": str(ROOT / "examples" / case.pictures[0])} for case in CASES
]
WITHOUT_IMAGES = [{"prompt": "There are"}, {"prompt": "The text is"}]
ROUTES = {
    "/v1/chat/completions": WITH_IMAGES,
    "/v1/responses": WITH_IMAGES,
    "/v1/completions": WITHOUT_IMAGES,
}


@pytest.mark.parametrize("route", ROUTES)
def test_load(server: Server, tmp_path: Path, route: str) -> None:
    """some seconds of load have no error, and every answer about an image is right"""
    report = measure(server, tmp_path, route, ROUTES[route])
    totals = report["metrics"]["request_totals"]
    assert totals["errored"] == 0
    assert totals["successful"] > len(ROUTES[route])
    answers = {request["output"] for request in report["requests"]["successful"]}
    assert all(answers)
    if ROUTES[route] is WITH_IMAGES:
        assert answers <= {answer for case in CASES for answer in case.answers}
