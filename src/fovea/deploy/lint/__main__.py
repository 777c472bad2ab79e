"""python -m fovea.deploy.lint FOLDER...: check manifests.

It prints a line for each fault, and returns 1 if there is one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from fovea.deploy.lint import lint
from fovea.deploy.lint.objects import KUSTOMIZATION

SUFFIXES = (".yaml", ".toml", ".json", ".yml")


def main(folders: Sequence[str]) -> int:
    """Check the objects of all folders together."""
    if not folders:
        print("usage: python -m fovea.deploy.lint FOLDER...", file=sys.stderr)
        return 2
    places = [Path(folder).absolute() for folder in folders]
    files: dict[str, str] = {}
    for place in places:
        _read(place, files)
    faults = lint(files, *map(str, places))
    for fault in faults:
        print(fault)
    return int(bool(faults))


def _read(folder: Path, files: dict[str, str]) -> None:
    """Read a folder, and the folders that its kustomization names."""
    if str(folder / KUSTOMIZATION) in files:
        return
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            files[str(path)] = path.read_text(encoding="utf-8")
    try:
        kustomization = yaml.safe_load(files.get(str(folder / KUSTOMIZATION), "")) or {}
    except yaml.YAMLError:
        return  # the linter names the file
    for key in ("resources", "components"):
        for entry in kustomization.get(key) or []:
            other = Path(os.path.normpath(folder / entry))
            if other.is_dir():
                _read(other, files)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
