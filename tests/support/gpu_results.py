"""A plugin of pytest that writes the result of each test at once, so that a time limit loses nothing.

    FOVEA_GPU_RESULTS=results.jsonl pytest -p tests.support.gpu_results ...

Each line is JSON: first the names of all tests ("collected"), then one line for each result: "test",
"outcome", "seconds", and "text", the traceback or the reason. A file that cannot be imported is a failed
test. With pytest-xdist the main process writes.

A GPU refuses every further call of a process in which a kernel has failed. A worker of pytest-xdist in this
state ends, and a new one takes over.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

RESULTS = Path(os.environ["FOVEA_GPU_RESULTS"])


def _write(**line: object) -> None:
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items and not _is_worker():
        _write(collected=[item.nodeid for item in session.items])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    if node.gateway.id == "gw0":
        _write(collected=list(ids))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed and not _is_worker():
        _write(test=report.nodeid, outcome="failed", seconds=0.0, text=report.longreprtext)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _is_worker() or (report.when != "call" and report.passed):
        return
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    text = "\n".join([text, *(content for title, content in report.sections if "stdout" in title)]).strip()
    _write(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), text=text)


def pytest_runtest_logfinish() -> None:
    if _is_worker() and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)
