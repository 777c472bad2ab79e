"""The version, the tag and the note of a release."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

_SECTION = re.compile(r"^## (\S+) \(([^)]+)\)$", re.MULTILINE)
_VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
MAXIMAL_NOTE = 125_000
"""Characters that GitHub accepts as the text of a release."""


def version_of(root: Path) -> str:
    """Return the version in pyproject.toml. root: folder of the repository."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def problems(root: Path, tag: str = "") -> Iterator[str]:
    """Yield what is wrong with a release.

    root: folder of the repository.
    tag: its tag, such as v1.2.3; "": it has none yet.
    """
    version = version_of(root)
    if not _VERSION.fullmatch(version):
        yield f"pyproject.toml: the version is {version}; accepted: 1.2.3, 1.2.3a1, 1.2.3b1, 1.2.3rc1"
    code = re.search(r'^__version__ = "([^"]+)"$', (root / "src/fovea/__init__.py").read_text(), re.MULTILINE)
    if code is None or code[1] != version:
        found = "none" if code is None else code[1]
        yield f"src/fovea/__init__.py: the version is {found}; pyproject.toml has {version}"
    changes = (root / "CHANGELOG.md").read_text()
    sections = _SECTION.findall(changes)
    if not sections or sections[0][0] != version:
        found = sections[0][0] if sections else "none"
        yield f"CHANGELOG.md: the newest section is of {found}; pyproject.toml has {version}"
    elif len(note(changes)) not in range(1, MAXIMAL_NOTE):
        length = f"{len(note(changes)):,} characters; accepted: 1 to {MAXIMAL_NOTE:,}"
        yield f"CHANGELOG.md: the newest section has {length}"
    names = [name for name, _ in sections]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"CHANGELOG.md: two sections are of {name}"
    if "Reporting a vulnerability" not in (root / "SECURITY.md").read_text():
        yield "SECURITY.md: it does not say how to report a vulnerability"
    if tag:
        yield from _tag_problems(tag, version, sections)


def _tag_problems(tag: str, version: str, sections: list[tuple[str, str]]) -> Iterator[str]:
    if tag != f"v{version}":
        yield f"the tag is {tag}; the version needs v{version}"
    if sections and not _DATE.fullmatch(sections[0][1]):
        yield f"CHANGELOG.md: the newest section has {sections[0][1]!r} for its date; accepted: 2026-01-31"


def note(changes: str) -> str:
    """Return the text of the newest section of a changelog, without its heading; "": it has none.

    The section's headings move up one level, and lines of a paragraph are joined, because GitHub shows every
    line break of a release's text.
    """
    parts = re.split(r"^## .*$", changes, flags=re.MULTILINE)
    if len(parts) < 2:
        return ""
    text = re.sub(r"^#(#+ )", r"\1", parts[1].strip(), flags=re.MULTILINE)
    return re.sub(r"(?<=[^\n])\n(?![\n#|]|\s*[-*] )\s*", " ", text)
