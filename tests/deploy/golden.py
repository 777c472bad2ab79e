"""Files that every target renders for the specs of `tests.deploy.specs`, kept under tests/deploy/golden.

    python -m tests.deploy.golden            # write the files of all targets again

A Python file gets the suffix .txt, so that it is not formatted and checked as a part of the project. If a
target refuses a spec, the file REFUSED has the reason. A file that equals one of src/fovea/deploy, or one of
another target or spec, is not kept: the file COPIES has a line with its path and the path of the other.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import TARGETS, render
from tests.deploy.specs import FULL, SMALL

FOLDER = Path(__file__).with_name("golden")
REPOSITORY = FOLDER.parents[2]
SOURCES = REPOSITORY / "src" / "fovea" / "deploy"
COPIES = "COPIES"
RULES = "kubernetes/components/monitoring/rules.yaml"
"""Not kept: it holds the rules of src/fovea/deploy/monitoring/rules, and its own test compares both."""
SPECS: dict[str, DeploySpec] = {"small": SMALL, "full": FULL}


def names() -> list[str]:
    """Return the names of the targets that have a module."""
    return [each.name for each in TARGETS if importlib.util.find_spec(f"fovea.deploy.targets.{each.module}")]


def rendered(target: str, spec: str) -> dict[str, str]:
    """Return the files that a target renders for a spec, by their path in the golden folder."""
    try:
        files = render(SPECS[spec], [target])
    except ConfigError as error:
        files = {"REFUSED": f"{error.message}\n"}
    return {
        f"{target}/{spec}/{path}" + (".txt" if path.endswith(".py") else ""): text
        for path, text in files.items()
        if path != RULES
    }


def kept(target: str, spec: str) -> dict[str, str]:
    """Return the files of the repository for a target and a spec, by the same paths."""
    folder = FOLDER / target / spec
    files = {
        path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    for line in files.pop(f"{target}/{spec}/{COPIES}", "").splitlines():
        path, source = line.split()
        files[path] = (REPOSITORY / source).read_text(encoding="utf-8")
    return files


def write_all() -> int:
    """Write the files of all targets. Returns their number, copies included."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    known = {
        path.read_text(encoding="utf-8"): path
        for path in sorted(SOURCES.rglob("*"))
        if path.is_file() and path.stat().st_size and path.suffix != ".pyc"
    }
    count = 0
    for target, spec in itertools.product(names(), SPECS):
        copies = []
        for path, text in rendered(target, spec).items():
            count += 1
            source = known.setdefault(text, FOLDER / path)
            if source != FOLDER / path:
                copies.append(f"{path} {source.relative_to(REPOSITORY).as_posix()}\n")
                continue
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text(text, encoding="utf-8")
        if copies:
            place = FOLDER / target / spec / COPIES
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("".join(copies), encoding="utf-8")
    return count


if __name__ == "__main__":
    print(f"{write_all()} files")
