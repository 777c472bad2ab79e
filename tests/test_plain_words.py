"""Docstrings, comments and messages are plain English: what a checker can see of the rules.

The full rules are in CONTRIBUTING.md, "Plain words". A checker sees only part of them: how a docstring
begins, that every class has one sentence that says what it is, and a few words that are always wrong.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "training", "benchmarks", "examples", "tools")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
OPENINGS = re.compile(r"(Of|What|Who|Whose|Whom|The same|As|Same|Likewise|Ditto)\b")
WRONG = re.compile(r"\bcan not\b|\bcan't\b|\bdon't\b|\bnobody's\b|\bwhosoever\b", re.IGNORECASE)
FIELD = re.compile(r"[a-z_]\w*(, [a-z_]\w*)*: ")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def complaints(source: str, *, library: bool) -> Iterator[str]:
    """library: also require a summary for every class."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, Documented):
            continue
        name, doc = getattr(node, "name", "module"), ast.get_docstring(node)
        line = getattr(node, "lineno", 1)
        if doc is None:
            if library and isinstance(node, ast.ClassDef) and not name.startswith("_"):
                yield f"{line}: class {name} has no docstring"
            continue
        first = doc.splitlines()[0].strip()
        if OPENINGS.match(first):
            yield f"{line}: {name} opens with {first.split()[0]!r}: {first}"
        if isinstance(node, ast.ClassDef) and FIELD.match(first):
            yield f"{line}: class {name} has no summary sentence before its fields: {first}"
    if not WRONG.search(source):  # few files have any of these words, and tokens take time
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) and (found := WRONG.search(token.string)):
            yield f"{token.start[0]}: {found.group()!r} in {token.string[:60]!r}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{complaint}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        for complaint in complaints(path.read_text(encoding="utf-8"), library=folder == "src")
    ]
    assert not found, "\n".join(found)


def test_pages() -> None:
    found = [
        f"{page}:{number}: {line}"
        for page in PAGES
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\bcan not\b", line)
    ]
    assert not found, "\n".join(found)


def test_the_checker_finds_riddles() -> None:
    source = '"""Of things."""\nclass Thing:\n    """size: bytes."""\n# it can not be\n'
    assert len(list(complaints(source, library=True))) == 3
