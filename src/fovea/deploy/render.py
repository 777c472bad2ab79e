"""Renders a spec for several targets into one mapping of files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from fovea.core.errors import ConfigError
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Files, target


def render(spec: DeploySpec, names: Iterable[str]) -> Files:
    """Return the files of all named targets.

    Raises ConfigError if a target cannot be rendered, or two of them render one path differently.
    """
    files: Files = {}
    for name in names:
        for path, text in target(name).load().render(spec).items():
            if files.setdefault(path, text) != text:
                raise ConfigError(
                    f"target {name!r} renders {path} unlike another target; "
                    "accepted: render them into folders of their own",
                    param="target",
                )
            check_path(path)
    return files


def check_path(path: str) -> None:
    """Raise ValueError if a path is not relative and beneath the output folder."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or str(parts) != path:
        raise ValueError(f"a renderer returned the path {path!r}")
