"""The pages are compared with the code: the files, links, tables and commands that they name must exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tools import reference

from fovea.cli.main import COMMANDS
from fovea.cli.models import markdown

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "src/fovea/assets/fovea-tiny/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:src|docs|tests|benchmarks|training|examples)/[\w./-]*)`", text)
    named += [f"{Path(page).parent}/{link}" for link in re.findall(r"\]\(([\w./-]+\.md)\)", text)]
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_links_lead_to_headings() -> None:
    """If a heading is renamed, a browser follows links to its old name to the top of the page."""
    texts = {page: re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S) for page in PAGES}
    anchors = {
        page: {_anchor(line) for line in re.findall(r"^#+ (.+)$", text, re.M)} for page, text in texts.items()
    }
    broken = []
    for page, text in texts.items():
        for target, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", text):
            path = page if not target else os.path.normpath(Path(page).parent / target)
            if anchor not in anchors.get(path, ()):
                broken.append(f"{page}: {target}#{anchor}")
    assert not broken


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_the_request_path_names_files() -> None:
    """Every step of the table in docs/architecture.md is a file, so that a reader can follow it."""
    text = (ROOT / "docs/architecture.md").read_text()
    table = text.split("## One request")[1].split("## Where is")[0]
    files = re.findall(r"`(src/[\w./]+\.py)`", table)
    assert len(files) >= 17
    assert all((ROOT / name).is_file() for name in files)


def test_model_table_is_what_the_command_prints() -> None:
    assert markdown() in (ROOT / "docs/models.md").read_text()


def test_reference_pages_are_what_the_code_says() -> None:
    """A setting, metric, error code or route that is new, renamed or gone shows in docs/reference-*.md."""
    assert reference.stale() == []


def test_commands_in_the_readme_exist() -> None:
    named = set(re.findall(r"^(?:\.venv/bin/)?fovea (\w+)", (ROOT / "README.md").read_text(), flags=re.M))
    assert named
    assert named <= set(COMMANDS)


def test_the_first_page_names_every_command() -> None:
    sentence = re.search(r"^Commands: (.*?); each has", (ROOT / "docs/index.md").read_text(), re.M | re.S)
    assert sentence is not None
    assert {name.removeprefix("fovea ") for name in re.findall(r"`([\w ]+)`", sentence[1])} == set(COMMANDS)


def test_the_picture_of_the_architecture_shows_every_package() -> None:
    """Each box of the picture is a folder or a file, and each folder of the engine is a box."""
    drawn = set(re.findall(r'class="package">(\w+)<', (ROOT / "docs/architecture.svg").read_text()))
    packages = {path.name for path in (ROOT / "src/fovea").iterdir() if (path / "__init__.py").is_file()}
    inner = {path.name for path in (ROOT / "src/fovea/engine").iterdir() if (path / "__init__.py").is_file()}
    files = {path.stem for path in (ROOT / "src/fovea/engine").glob("*.py")}
    assert drawn - files == (packages - {"engine"}) | inner
