"""Rules for all files of the repository: how large they are, and under which name Fovea is installed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.house import code_lines

from fovea.core.names import DISTRIBUTION, install_command

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "src/fovea/assets"
MIB = 1 << 20
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IGNORED = {name.strip("/") for name in (ROOT / ".gitignore").read_text().split() if "*" not in name} | {
    ".git"
}
TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".html", ".js", ".j2", ".sh", ".ipynb", ""}
ANOTHER = (
    re.compile(r"(?<![\w./-])fovea\[[a-z,]+\]"),
    re.compile(r"pip3? install [^\n`]*?(?<![\w./=@-])['\"]?fovea(?![\w/.\[-])"),
    re.compile(r"(?<![\w./-])fovea(==|>=|~=)\d"),
)
"""Commands that would install PyPI's `fovea`, which is another project."""


def files(folder: Path = ROOT) -> Iterator[Path]:
    """All files that git would track. (A source archive has no git.)"""
    for path in sorted(folder.iterdir()):
        if path.relative_to(ROOT).as_posix() in IGNORED or path.name in IGNORED or path.suffix == ".egg-info":
            continue
        if path.is_dir():
            yield from files(path)
        elif path.is_file():
            yield path


FILES = tuple(files())


def test_large_files_are_assets_of_the_package() -> None:
    """Weights in training/ and pictures in packages/ once were 52 MB, for a model that could not read."""
    outside = [path for path in FILES if not path.is_relative_to(ASSETS)]
    assert len(outside) > 1000
    assert [str(path) for path in outside if path.stat().st_size > MIB] == []
    assert [str(path) for path in outside if path.suffix == ".safetensors"] == []


def test_the_checkout_is_small() -> None:
    """A machine for tests on GPUs takes 64 MiB; wheels are up to 24 of them."""
    assert sum(path.stat().st_size for path in FILES) < 38 * MIB


def test_every_hint_installs_this_project_and_not_its_namesake() -> None:
    """Errors and pages once said `pip install 'fovea[redis]'`, which installs another project's package."""
    hints = 0
    for path in FILES:
        if path.suffix not in TEXT or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        hints += len(re.findall(rf"{DISTRIBUTION}\[|install_command\(", text))
        for pattern in ANOTHER:
            assert not (found := pattern.search(text)), f"{path}: {found[0]!r}; accepted: {DISTRIBUTION}"
    assert hints > 8


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'fovea[redis]'",
        "pip install -U fovea",
        "pip install fovea httpx",
        'RUN pip install "fovea"',
        "fovea[otel,pdf]",
        "fovea==0.1.0",
    ],
)
def test_hints_of_the_wrong_name_are_found(text: str) -> None:
    assert any(pattern.search(text) for pattern in ANOTHER)


@pytest.mark.parametrize(
    "text",
    ["pip install '.[redis]'", "pip install dist/fovea_vlm-0.1.0.whl", install_command("pdf"), "fovea serve"],
)
def test_other_hints_are_accepted(text: str) -> None:
    assert not any(pattern.search(text) for pattern in ANOTHER)


def test_one_name_is_everywhere() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert list(PROJECT["scripts"]) == ["fovea"]


def test_every_extra_names_distributions_that_exist() -> None:
    """An extra once named fovea-page, which was never published: anyone could have taken that name."""
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().split()}
    for extra, requirements in PROJECT["optional-dependencies"].items():
        names = {re.split(r"[\[<>=; ]", each)[0].lower() for each in requirements}
        assert names <= pinned, extra


def test_every_command_that_a_message_names_has_an_extra() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in FILES if path.suffix == ".py")
    named = set(re.findall(r"install_command\(['\"](\w+)['\"]\)", sources))
    assert len(named) > 5
    assert named <= PROJECT["optional-dependencies"].keys()


def test_lines_of_code_are_counted_without_comments_and_docstrings() -> None:
    text = '"""A module."""\n\n# A comment\nx = [\n    1,\n]\n\n\ndef f():\n    """A function."""\n'
    assert code_lines(text + '    return """two\nlines"""\n') == 6
    assert code_lines("") == 0
