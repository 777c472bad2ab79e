"""The checks of a release: version, note, packages, image and bill of materials; and the workflows."""

from __future__ import annotations

import json
import re
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import DISTRIBUTION
from tools.release import image, packages
from tools.release.facts import note, problems
from tools.release.newcomer import index
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


def test_the_note_is_the_newest_section_without_broken_lines() -> None:
    newest = "One\nparagraph.\n\n### Added\n\n- A thing\n  of two lines.\n- Another.\n"
    text = note(f"# Changelog\n\n## 1.1.0 (2026-01-31)\n\n{newest}\n## 1.0.0 (2026-01-01)\n\nOld.\n")
    assert text == "One paragraph.\n\n## Added\n\n- A thing of two lines.\n- Another."
    assert note("# Changelog\n") == ""


def test_a_release_without_a_note_is_refused(copy: Path) -> None:
    version = re.search(r'^version = "(.+)"', (copy / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    (copy / "CHANGELOG.md").write_text(f"# Changelog\n\n## {version[1]} (2026-01-31)\n")
    assert any("the newest section has 0 characters" in line for line in problems(copy))


TRACKED = {"src/fovea/cli/main.py", "pyproject.toml"}


@pytest.mark.parametrize(
    ("package", "name", "content", "words"),
    [
        ("a.whl", "fovea/cli/main.py", "", ""),
        ("a.whl", "fovea/kernels/native/lib/avx2.so", "", ""),
        ("a.whl", "fovea_vlm-1.0.0.dist-info/METADATA", "", ""),
        ("a.whl", "fovea/cli/notes.txt", "", "notes.txt is not a file of the repository"),
        ("a.whl", "fovea/cli/main.py", "from /home/me/clone/src", "names the folder in which it was built"),
        ("a.tar.gz", "pyproject.toml", "", ""),
        ("a.tar.gz", "PKG-INFO", "", ""),
        ("a.tar.gz", "secrets.env", "", "secrets.env is not a file of the repository"),
    ],
)  # fmt: skip
def test_a_package_holds_only_what_the_repository_has(
    package: str, name: str, content: str, words: str
) -> None:
    found = list(packages.foreign(package, {name: content.encode()}, TRACKED, "/home/me/clone"))
    assert [words in line for line in found] == [True] * bool(words)


def test_metadata_of_another_version_is_refused() -> None:
    fields = {
        "Name": DISTRIBUTION, "Version": "1.0.0", "Requires-Python": "<3.14,>=3.11", "Summary": "Serves.",
        "License-Expression": "Apache-2.0", "Description-Content-Type": "text/markdown",
    }  # fmt: skip
    metadata = "".join(f"{field}: {value}\n" for field, value in fields.items()).encode()
    assert list(packages.metadata_problems("a.tar.gz", {"PKG-INFO": metadata}, "1.0.0")) == []
    (line,) = packages.metadata_problems("a.tar.gz", {"PKG-INFO": metadata}, "1.0.1")
    assert line == "a.tar.gz: Version is 1.0.0; it must be 1.0.1"
    files = {"f.dist-info/METADATA": metadata, "f.dist-info/entry_points.txt": b"[console_scripts]\n"}
    (line,) = packages.metadata_problems("a.whl", files, "1.0.0")
    assert "`fovea` is not among its entry points" in line


def test_base_images_are_pinned_in_place() -> None:
    lines = ("python:3.12-slim AS install", "install AS more", "ghcr.io/owner/base:1", "python:3.12-slim")
    text = "".join(f"FROM {line}\n" for line in lines)
    assert image.bases(text) == [
        ("python:3.12-slim", ""),
        ("ghcr.io/owner/base:1", ""),
        ("python:3.12-slim", ""),
    ]
    assert len(list(image.unpinned(text))) == 2
    old, new = (f"sha256:{digit * 64}" for digit in "12")
    pinned = image.pin(image.pin(text, lambda name: old), lambda name: new)
    assert list(image.unpinned(pinned)) == []
    assert pinned.splitlines()[:2] == [f"FROM python:3.12-slim@{new} AS install", "FROM install AS more"]
    assert old not in pinned


def test_the_digest_is_the_one_that_the_registry_names() -> None:
    asked: dict[str, Mapping[str, str]] = {}

    def ask(url: str, headers: Mapping[str, str]) -> tuple[Mapping[str, str], bytes]:
        asked[url] = headers
        if "token" in url:
            return {}, json.dumps({"token": "secret"}).encode()
        return {"Docker-Content-Digest": f"sha256:{'a' * 64}" if "python" in url else "none"}, b""

    assert image.digest("python:3.12-slim", ask) == f"sha256:{'a' * 64}"
    headers = asked["https://registry-1.docker.io/v2/library/python/manifests/3.12-slim"]
    assert headers["Authorization"] == "Bearer secret"
    assert "image.index" in headers["Accept"]
    with pytest.raises(ValueError, match="without a digest"):
        image.digest("ghcr.io/owner/base:1", ask)
    assert "https://ghcr.io/v2/owner/base/manifests/1" in asked


def test_the_image_holds_the_wheels_and_hadolint_finds_no_fault() -> None:
    text = image.DOCKERFILE.read_text()
    assert {name for name, _ in image.bases(text)} == {"python:3.12-slim-bookworm"}
    assert "USER 1000:1000" in text
    if shutil.which("hadolint", path=str(Path(sys.executable).parent)):
        assert list(image.problems(text)) == []


def test_the_local_index_offers_its_wheels_alone(tmp_path: Path) -> None:
    wheel = tmp_path / "fovea_vlm-1.0.0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    with index(wheel) as address:
        with urllib.request.urlopen(f"{address}{DISTRIBUTION}/") as page:
            assert f'href="{wheel.name}"' in page.read().decode()
        with urllib.request.urlopen(f"{address}{DISTRIBUTION}/{wheel.name}") as content:
            assert content.read() == b"wheel"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}numpy/")


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
                assert re.fullmatch(r"(actions|docker|pypa)/[a-z-]+@[0-9a-f]{40}", step["uses"]), (
                    "pinned by its commit"
                )
                continue
            command = re.fullmatch(r"(?:sudo )?make ([a-z -]+?)(?: (?:TAG|ONLY)=\S+)?", step["run"])
            assert command is not None, step["run"]
            for target in command[1].split():
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_only_what_was_tried_is_published_and_no_token_is_stored() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    needs = {name: job.get("needs", []) for name, job in jobs.items()}
    assert needs == {"build": [], "try": "build", "pypi": "try", "image": "try", "page": ["pypi", "image"]}
    assert "secrets." not in text
    writes = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}
    assert writes == {"pypi", "image", "page"}
    assert all(jobs[name]["permissions"]["id-token"] == "write" for name in writes), "each signs"
