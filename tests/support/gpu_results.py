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


class Writer:
    """Writes the lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._write(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if node.gateway.id == "gw0":
            self._write(collected=list(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, outcome="failed", seconds=0.0, text=report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        printed = [content for title, content in report.sections if "stdout" in title]
        text = "\n".join([text, *printed]).strip()
        self._write(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), text=text)

    def _write(self, **line: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Worker:
    """Ends its process if the GPU answers no more."""

    def pytest_runtest_logfinish(self) -> None:
        if torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(1)


def pytest_configure(config: pytest.Config) -> None:
    path = Path(os.environ["FOVEA_GPU_RESULTS"])
    config.pluginmanager.register(Worker() if hasattr(config, "workerinput") else Writer(path))
