"""Files that every target renders for the specs of `tests.deploy.specs`, kept beneath tests/deploy/golden.

    python -m tests.deploy.golden            # write the files of all targets anew
    python -m tests.deploy.golden nginx      # of one target

A Python file gets the suffix .txt, so that it is not formatted and checked as a part of the project. If a
target refuses a spec, the file REFUSED has the reason. A file that equals one of src/fovea/deploy is not
kept: the file COPIES has a line with its path and the path of the other.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import fovea.deploy
from fovea.core.errors import ConfigError
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import TARGETS, render
from tests.deploy.specs import FULL, SMALL

FOLDER = Path(__file__).with_name("golden")
SOURCES = Path(fovea.deploy.__file__).parent
COPIES = "COPIES"
SPECS: dict[str, DeploySpec] = {"small": SMALL, "full": FULL}


def names() -> list[str]:
    """Return the names of the targets that have a module."""
    return [each.name for each in TARGETS if importlib.util.find_spec(f"fovea.deploy.targets.{each.module}")]


def rendered(target: str, spec: str) -> dict[str, str]:
    """Return the files that a target renders for a spec, by their path beneath the golden folder."""
    try:
        files = render(SPECS[spec], [target])
    except ConfigError as error:
        files = {"REFUSED": f"{error.message}\n"}
    return {
        f"{target}/{spec}/{path}" + (".txt" if path.endswith(".py") else ""): text
        for path, text in files.items()
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
        files[path] = (SOURCES / source).read_text(encoding="utf-8")
    return files


def write(target: str) -> int:
    """Write all files of a target anew. Returns their number."""
    shutil.rmtree(FOLDER / target, ignore_errors=True)
    sources = {
        path.read_bytes(): path.relative_to(SOURCES).as_posix()
        for path in sorted(SOURCES.rglob("*"))
        if path.is_file() and path.stat().st_size and path.suffix != ".pyc"
    }
    count = 0
    for spec in SPECS:
        copies = []
        for path, text in rendered(target, spec).items():
            count += 1
            if (source := sources.get(text.encode())) is not None:
                copies.append(f"{path} {source}\n")
                continue
            (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
            (FOLDER / path).write_text(text, encoding="utf-8")
        if copies:
            (FOLDER / target / spec / COPIES).write_text("".join(copies), encoding="utf-8")
    return count


if __name__ == "__main__":
    for name in sys.argv[1:] or names():
        print(f"{name}: {write(name)} files")
