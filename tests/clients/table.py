"""Run the tests of all clients, and write what they found to docs/clients.md.

    make test-clients                                   # sets up the environment of the clients, too
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

These public clients, and two tools that test servers (guidellm and schemathesis), were run against
`fovea serve` with the bundled model, and against `fovea gateway` in front of it, which translated
`/v1/messages` and `/v1/responses` to chat completions. `make test-clients` runs the tests in
`tests/clients/`, which check that the client understands every answer and that answers about images are
right, and writes this page. Each test is about one thing that a client does, some with several inputs.
"""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a test with one input.

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


def page(results: Sequence[Result], through: Sequence[Result]) -> str:
    """The page about the results, in Markdown.

    through: results of the same tests through the gateway.
    """
    works, works_through = (sum(each.works is True for each in some) for some in (results, through))
    versions = {result.client: result.version for result in results}
    lines = [
        INTRODUCTION,
        f"{len(versions)} clients, {len(results)} tests: {works} work, {works_through} through the gateway.",
    ]
    for client, version in versions.items():
        groups = dict.fromkeys(result.does for result in results if result.client == client)
        ways = [[_cell(_of(client, does, some)) for does in groups] for some in (results, through)]
        counts = [sum(cell == "yes" for cell in cells) for cells in ways]
        lines.append(
            f"\n## {client} {version}\n\n{counts[0]} of {len(groups)} work, {counts[1]} through the gateway."
        )
        exceptions = [
            f"- {does}{place}: {cell}"
            for place, cells in zip(("", " (gateway)"), ways, strict=True)
            for does, cell in zip(groups, cells, strict=True)
            if cell != "yes"
        ]
        lines += ["", *exceptions] if exceptions else []
    return "\n".join(lines) + "\n"


def _of(client: str, does: str, results: Sequence[Result]) -> list[Result]:
    return [result for result in results if (result.client, result.does) == (client, does)]


def _cell(results: Sequence[Result]) -> str:
    """Say whether a test works with all its parameters, and if not, why."""
    count = sum(result.works is True for result in results)
    answer = "yes" if count == len(results) else "no" if not count else f"{count} of {len(results)}"
    if all(result.works is None for result in results):
        answer = "not tested"
    reasons = dict.fromkeys(result.reason for result in results if result.reason)
    return ": ".join([answer, *list(reasons)[:1]])


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
        expected = getattr(report, "wasxfail", "")
        works = None if report.skipped and not expected else report.passed
        self.results.setdefault(
            report.nodeid,
            Result(
                package,
                importlib.metadata.version(package),
                self._does[report.nodeid],
                works,
                "" if report.passed else one_line(expected or _reason(report)),
            ),
        )


def _does(item: pytest.Item) -> str:
    """The first line of the test's docstring."""
    function = getattr(item, "function", None)
    words: str = (function.__doc__ or item.name).strip().splitlines()[0]
    return words


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr)


def main() -> int:
    direct, through = Recorder(), Recorder()
    words = ["-c", str(HERE / "pytest.ini"), "-q", "--tb=short", str(HERE)]
    statuses = [
        pytest.main(words, plugins=[direct]),
        pytest.main([*words, "--through-gateway"], plugins=[through]),
    ]
    text = page(list(direct.results.values()), list(through.results.values()))
    PAGE.write_text(text, encoding="utf-8")
    return max(map(int, statuses))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
