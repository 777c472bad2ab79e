"""The checks of a release, its bill of materials, and the workflows."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import DISTRIBUTION
from tools.release.check import problems
from tools.release.sbom import complete_bom

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "CHANGELOG.md", "SECURITY.md", "src/fovea/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def test_the_repository_can_be_released() -> None:
    assert list(problems(ROOT)) == []


@pytest.mark.parametrize(
    ("name", "before", "after", "words"),
    [
        ("src/fovea/__init__.py", '__version__ = "', '__version__ = "9', "__init__.py: the version is 9"),
        ("CHANGELOG.md", "## 0", "## 9.0", "CHANGELOG.md: the newest section"),
        ("SECURITY.md", "Reporting", "About", "SECURITY.md"),
        ("pyproject.toml", 'version = "', 'version = "one.', "accepted: 1.2.3"),
    ],
)  # fmt: skip
def test_a_wrong_version_is_found(copy: Path, name: str, before: str, after: str, words: str) -> None:
    change(copy / name, before, after)
    assert any(words in line for line in problems(copy))


def test_a_tag_needs_its_version_and_a_date(copy: Path) -> None:
    version = re.search(r'^version = "(.+)"', (copy / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert any("the tag is v9.9.9" in line for line in problems(copy, "v9.9.9"))
    text = (copy / "CHANGELOG.md").read_text()
    (copy / "CHANGELOG.md").write_text(re.sub(r"^## (\S+) \(.*\)$", r"## \1 (2026-01-31)", text, flags=re.M))
    assert list(problems(copy, f"v{version[1]}")) == []


def test_the_bill_of_materials_has_the_bundled_parts() -> None:
    def package(name: str) -> dict[str, Any]:
        return {"type": "library", "bom-ref": name, "name": name, "version": "1.0"}

    bom = complete_bom(
        {
            "components": [package(DISTRIBUTION), package("torch"), package("pip")],
            "dependencies": [
                {"ref": DISTRIBUTION, "dependsOn": ["torch", "pip"]},
                {"ref": "pip"},
                {"ref": "torch"},
            ],
        }
    )
    assert bom["metadata"]["component"]["name"] == DISTRIBUTION
    names = [each["name"] for each in bom["components"]]
    assert names == ["torch", "highway", "dejavu-fonts", "fovea-tiny"]
    (own,) = (each for each in bom["dependencies"] if each["ref"] == DISTRIBUTION)
    assert len(own["dependsOn"]) == 4
    with pytest.raises(ValueError, match="not installed"):
        complete_bom({"components": [package("torch")]})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_of_the_makefile_alone(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    makefile = (ROOT / "Makefile").read_text()
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"]), "pinned by its commit"
                continue
            command = re.fullmatch(r"(?:sudo )?make ([a-z -]+?)(?: TAG=\S+)?", step["run"])
            assert command is not None, step["run"]
            for target in command[1].split():
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
