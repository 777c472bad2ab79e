"""Writes rendered files. This is the only module of `deploy` that writes to the disk.

A manifest with the digest of every written file lies beside them. With it a later run knows which files a
person has edited since: these are not overwritten unless asked, and files that are no longer rendered are
removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.deploy.target import Files

MANIFEST = ".fovea-deploy.json"


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Paths of the files, by what the call did to them."""

    created: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]


def write(files: Files, folder: Path, *, force: bool = False) -> WriteResult:
    """Write files under a folder.

    force: overwrite files that were edited, or that others have created.
    Raises ConfigError, before anything is written, if a file would be overwritten without `force`, if a path
    is a link or no file, or if the folder cannot be written.
    """
    _check_paths(folder, [MANIFEST])
    before = _manifest(folder)
    _check_paths(folder, [*files, *before])
    present = {path: _digest_of(folder / path) for path in {*files, *before}}
    foreign = [
        path
        for path, text in files.items()
        if present[path] not in ("", before.get(path), _digest(text)) and not force
    ]
    if foreign:
        raise ConfigError(
            f"{', '.join(sorted(foreign))} in {folder} was edited, or not written by fovea; "
            "accepted: another folder, or --force to overwrite",
            param="out",
        )
    stale = [path for path in before if path not in files and present[path] == before[path]]
    try:
        for path, text in files.items():
            _write(folder / path, text)
        for path in stale:
            (folder / path).unlink()
        manifest = {path: _digest(text) for path, text in sorted(files.items())}
        _write(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}", param="out") from error
    digests = {path: _digest(text) for path, text in files.items()}
    return WriteResult(
        tuple(path for path in sorted(files) if not present[path]),
        tuple(path for path in sorted(files) if present[path] not in ("", digests[path])),
        tuple(path for path in sorted(files) if present[path] == digests[path]),
        tuple(sorted(stale)),
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if text.startswith("#!"):
        path.chmod(0o755)


def _check_paths(folder: Path, paths: Iterable[str]) -> None:
    """Raise ConfigError if a path leads through a link or to something that is not a file.

    Otherwise whoever may write into the folder could choose other files to be overwritten or removed.
    """
    for path in paths:
        at = folder
        for part in path.split("/"):
            at /= part
            if at.is_symlink():
                raise ConfigError(f"{at} is a link; accepted: a folder without links", param="out")
        if at.exists() and not at.is_file():
            raise ConfigError(
                f"{at} is not a file; accepted: a folder in which this path is a file or free", param="out"
            )


def _manifest(folder: Path) -> dict[str, str]:
    try:
        values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {path: str(digest) for path, digest in values.items() if _is_beneath(path)}


def _is_beneath(path: str) -> bool:
    """Tell whether a path of a manifest is one that `write` may have written."""
    parts = path.split("/")
    return path.isprintable() and not {"", ".", ".."}.intersection(parts)


def _digest_of(path: Path) -> str:
    """The digest of a file; "" if there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
