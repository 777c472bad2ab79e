"""The site has every page once, its links lead to pages, and versions lie beside each other.

`make site` builds it with Zensical; these tests need only what prepares that.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools import site
from tools.site import (
    CONFIGURATION,
    SiteError,
    check,
    fetch_published,
    moved,
    notebook_page,
    places,
    publish,
    push,
    stage,
)

from tests.support.programs import needs

ROOT = Path(__file__).resolve().parent.parent
WHERE = {"docs/serving.md": "serving.md", "benchmarks/LOG.md": "measured/log.md"}


def listed(entry: Any) -> Iterator[str]:
    """The pages of an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
        return
    for each in entry.values() if isinstance(entry, dict) else entry:
        yield from listed(each)


def test_the_navigation_has_every_page_once() -> None:
    nav = tomllib.loads(CONFIGURATION.read_text())["project"]["nav"]
    assert sorted(listed(nav)) == sorted(place for place in places().values() if place.endswith(".md"))


def test_the_first_page_leads_to_every_page_of_the_folder() -> None:
    """On a code host the first page is the only list of pages."""
    text = (ROOT / "docs/index.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\]\(([\w-]+\.md)", text)) == set()


def test_all_links_of_all_pages_lead_to_pages(tmp_path: Path) -> None:
    stage(tmp_path)
    pages = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.md")}
    assert pages.keys() == {place for place in places().values() if place.endswith(".md")}
    for page in pages.values():
        text = site.FENCE.sub("", page.read_text())
        for target, _ in site.LINK.findall(text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_links_follow_pages_to_their_places() -> None:
    text = "[a](../benchmarks/LOG.md#x) [b](https://example.com/docs/a.md) [c](#here) [d](../README.md)"
    moved_text = moved(text, "docs/serving.md", WHERE)
    assert moved_text == "[a](measured/log.md#x) [b](https://example.com/docs/a.md) [c](#here) [d](index.md)"
    assert moved("[s](../docs/serving.md)", "benchmarks/LOG.md", WHERE) == "[s](../serving.md)"


def test_code_is_left_as_it_is() -> None:
    text = "```\n[a](nowhere.md)\n```\n"
    assert moved(text, "docs/serving.md", WHERE) == text


def test_a_bar_in_a_table_has_no_backslash() -> None:
    assert moved(r"| a | `b \| c` |", "docs/serving.md", WHERE) == "| a | `b | c` |"


def test_a_link_to_no_page_is_refused() -> None:
    with pytest.raises(SiteError, match=r"docs/serving\.md: the link to \.\./src/fovea leads to no page"):
        moved("[code](../src/fovea)", "docs/serving.md", WHERE)


def test_a_notebook_becomes_a_page_with_its_outputs() -> None:
    text, pictures = notebook_page(ROOT / "examples/notebooks/ask.ipynb")
    assert text.startswith("# Ask, and see where the model looked\n")
    assert 'The text is "NPX".' in text
    assert all(f"]({name})" in text for name in pictures)
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())
    assert len(pictures) == 2


def built(folder: Path, text: str = "<h1>Fovea</h1>") -> Path:
    folder.mkdir()
    (folder / "index.html").write_text(text)
    return folder


def test_versions_lie_beside_each_other_and_the_newest_is_first(tmp_path: Path) -> None:
    public = tmp_path / "public"
    for version in ("0.9", "0.10", "0.9"):
        publish(built(tmp_path / "html"), public, version)
    assert [each["version"] for each in json.loads((public / "versions.json").read_text())] == ["0.10", "0.9"]
    assert "url=0.10/index.html" in (public / "index.html").read_text()
    assert (public / "0.9/index.html").exists()


@pytest.mark.parametrize(
    "tag",
    ['<script src="https://unpkg.com/a">', '<link rel=stylesheet href="//fonts.example/css">'],
)
def test_a_page_that_loads_from_another_host_is_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(SiteError, match=r"index\.html loads from another host"):
        check(built(tmp_path / "html", tag))
    check(built(tmp_path / "fine", '<script src="./a.js"></script><a href="https://example.com">'))


@needs("git")
def test_a_second_version_is_published_beside_the_first(tmp_path: Path) -> None:
    origin, clone = tmp_path / "origin.git", tmp_path / "clone"
    subprocess.run(["git", "init", "--quiet", "--bare", origin], check=True)
    subprocess.run(["git", "clone", "--quiet", origin, clone], check=True, capture_output=True)
    named = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    (clone / "README.md").write_text("source")
    subprocess.run(["git", "add", "."], cwd=clone, check=True)
    subprocess.run([*named, "commit", "--quiet", "-m", "Begin"], cwd=clone, check=True)
    public = clone / "out/public"
    for version in ("0.1", "0.2"):
        fetch_published(public, clone)
        publish(built(tmp_path / "html"), public, version)
        push(public, version)
    command = ["git", "ls-tree", "-r", "--name-only", site.BRANCH]
    tree = subprocess.run(command, cwd=origin, check=True, capture_output=True, text=True).stdout.split()
    assert tree == [".nojekyll", "0.1/index.html", "0.2/index.html", "index.html", "versions.json"]
