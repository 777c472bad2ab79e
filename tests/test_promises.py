"""Every promise of the README's first section has tests, which docs/promises.md names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs/promises.md").read_text()
FIRST = README[: README.index("\n## ")]


def promises() -> list[str]:
    """The beginnings of the promises: of a paragraph, and of each point in bold type."""
    paragraph = re.findall(r"^(Fovea generates what transformers generates)", FIRST, re.M)
    return [*paragraph, *(name.rstrip(".") for name in re.findall(r"^- \*\*(.+?)\*\*", FIRST, re.M))]


def sections() -> dict[str, str]:
    """The lines of each promise on the page."""
    parts = re.split(r"^## (.+)\n", PAGE, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_promise_has_tests() -> None:
    assert len(promises()) == 1 + FIRST.count("\n- ")
    assert list(sections()) == promises()
    for promise, lines in sections().items():
        claims = re.split(r"^- ", lines.strip(), flags=re.M)[1:]
        assert claims, promise
        assert all("`tests/" in claim for claim in claims), promise


def test_every_named_test_exists() -> None:
    """A promise whose test was renamed or removed would be held by nothing."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []


def row(name: str) -> list[float]:
    """The figures of a row of the README's table of engines, Fovea's first."""
    line = next(line for line in README.splitlines() if line.startswith(f"| {name}"))
    cells = [cell.strip(" *").replace(",", "") for cell in line.split("|")[2:-1]]
    return [float(cell) for cell in cells if cell != "-"]


def test_figures_are_those_of_the_table() -> None:
    """The sentences agree with the README's table, and the table with what was measured."""
    decode, gaps = row("decode, one request"), row("longest gap of a stream")
    ratio = re.search(r"decode ([\d.]+) times as many tokens per second as the next best", FIRST)
    assert ratio
    assert float(ratio[1]) == round(decode[0] / max(decode[1:]), 1)
    assert f"is {gaps[0]:.0f} ms; other engines stop for three seconds and more" in FIRST
    assert min(gaps[1:]) >= 3000
    first = row("first token of that 896x896 image")
    assert ("own first token can come a little later" in FIRST) == (first[0] > min(first[1:]))
    measured = (ROOT / "benchmarks/results/peers.md").read_text()
    for name, figures in (("decode, one request", decode), ("longest gap of a stream", gaps)):
        line = next(line for line in measured.splitlines() if line.startswith(f"| {name}"))
        theirs = [float(n.replace(",", "")) for n in re.findall(r"\| ([\d,.]+) \(", line)]
        assert [round(n) for n in theirs] == [round(n) for n in figures]


def test_clients_are_those_of_their_page() -> None:
    """schemathesis, on that page, too, tests servers and is no client."""
    clients = re.findall(r"^## (\S+)", (ROOT / "docs/clients.md").read_text(), re.M)
    assert "Seven client libraries and load generators" in re.sub(r"\s+", " ", FIRST)
    assert len(set(clients) - {"schemathesis"}) == 7
