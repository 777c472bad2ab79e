"""Programs for maintainers: wheels, releases, dashboards, reference pages, fresh systems for the tests."""

import tomllib
from pathlib import Path

_PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
DISTRIBUTION: str = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["name"]
"""Name for pip, as in `fovea.core.names`, for environments without Fovea."""
