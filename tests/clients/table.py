"""Run the tests of all clients, and write what they found to docs/clients.md.

    python -m venv .venv-clients
    .venv-clients/bin/pip install --no-deps -r tests/clients/requirements-checked.txt
    .venv-clients/bin/pip install -r tests/clients/requirements.txt
    .venv-clients/bin/python tests/clients/table.py

The server is the one of .venv/bin/fovea, or the program that the variable FOVEA names.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "clients.md"
LONGEST_REASON = 160
PACKAGES: Mapping[str, str] = {
    "test_openai": "openai",
    "test_anthropic": "anthropic",
    "test_litellm": "litellm",
    "test_langchain": "langchain-openai",
    "test_llama_index": "llama-index-llms-openai-like",
    "test_instructor": "instructor",
    "test_guidellm": "guidellm",
    "test_schemathesis": "schemathesis",
}
"""The package that each file of tests is about."""

INTRODUCTION = """\
# Clients

These public clients were run against `fovea serve` with the bundled model, fovea-tiny. Every row is a test of
`tests/clients/`; `python tests/clients/table.py` runs them and writes this page.
"""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a test, with all its parameters.

    client: the package
    does: what the client does in the test
    works: None if the test was skipped
    reason: why it does not work, or why it was skipped
    """

    client: str
    version: str
    does: str
    works: bool | None
    reason: str = ""


def page(results: Sequence[Result]) -> str:
    """The page about the results, in Markdown."""
    works = sum(result.works is True for result in results)
    clients = len({result.client for result in results})
    lines = [
        INTRODUCTION,
        f"{clients} clients, {len(results)} tests: {works} work.\n",
        "| client | version | what it does | works |",
        "|---|---|---|---|",
        *(_row(result) for result in results),
    ]
    return "\n".join(lines) + "\n"


def _row(result: Result) -> str:
    answer = {True: "yes", False: "no", None: "not tested"}[result.works]
    works = f"{answer}: {result.reason}" if result.reason else answer
    cells = (result.client, result.version, result.does, works)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def one_line(text: str) -> str:
    """The first sentence of a failure, without what differs between two runs."""
    words = " ".join(text.split())
    plain = re.sub(r"127\.0\.0\.1:\d+|0x[0-9a-f]+|/[\w./-]*/site-packages/", "...", words)
    return plain if len(plain) <= LONGEST_REASON else plain[: LONGEST_REASON - 4].rstrip() + " ..."


class Recorder:
    """A plugin of pytest that gathers the results."""

    def __init__(self) -> None:
        self.results: dict[str, Result] = {}
        self._does: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.path.stem in PACKAGES]
        for item in items:
            self._does[item.nodeid] = _does(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        package = PACKAGES[Path(report.nodeid.split("::")[0]).stem]
        works = None if report.skipped else report.passed
        self.results.setdefault(
            report.nodeid,
            Result(
                package,
                importlib.metadata.version(package),
                self._does[report.nodeid],
                works,
                "" if report.passed else one_line(_reason(report)),
            ),
        )


def _does(item: pytest.Item) -> str:
    """The first line of the test's docstring, and its parameters."""
    function = getattr(item, "function", None)
    words = (function.__doc__ or item.name).strip().splitlines()[0]
    parameters = re.search(r"\[(.*)\]$", item.name)
    return f"{words} ({parameters.group(1)})" if parameters else words


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr)


def main() -> int:
    recorder = Recorder()
    status = pytest.main(["-c", str(HERE / "pytest.ini"), "-q", "--tb=short", str(HERE)], plugins=[recorder])
    PAGE.write_text(page(list(recorder.results.values())), encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
