"""Check that a release is consistent: `make release-check`, or `make release-check TAG=v1.2.3`.

The version is in three places: pyproject.toml, fovea.__version__ and the newest section of CHANGELOG.md.
With a tag, the section must have a date, and the tag must be the version.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SECTION = re.compile(r"^## (\S+) \(([^)]+)\)$", re.MULTILINE)
_VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def problems(root: Path, tag: str = "") -> Iterator[str]:
    """Yield what is wrong with a release.

    root: folder of the repository.
    tag: its tag, such as v1.2.3; "": it has none yet.
    """
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    if not _VERSION.fullmatch(version):
        yield f"pyproject.toml: the version is {version}; accepted: 1.2.3, 1.2.3a1, 1.2.3b1, 1.2.3rc1"
    code = re.search(r'^__version__ = "([^"]+)"$', (root / "src/fovea/__init__.py").read_text(), re.MULTILINE)
    if code is None or code[1] != version:
        found = "none" if code is None else code[1]
        yield f"src/fovea/__init__.py: the version is {found}; pyproject.toml has {version}"
    sections = _SECTION.findall((root / "CHANGELOG.md").read_text())
    if not sections or sections[0][0] != version:
        found = sections[0][0] if sections else "none"
        yield f"CHANGELOG.md: the newest section is of {found}; pyproject.toml has {version}"
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tag", default="", help="tag of the release, such as v1.2.3")
    found = list(problems(ROOT, parser.parse_args().tag))
    for line in found:
        print(line, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
