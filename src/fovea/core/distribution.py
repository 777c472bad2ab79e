"""The distribution: its name for pip, its extras, and the model that comes with it."""

from __future__ import annotations

from pathlib import Path

DISTRIBUTION = "fovea-vlm"
"""Name for pip. The name `fovea` belongs to another project on PyPI."""
BUNDLED = "fovea-tiny"
"""Name of the bundled model, which is found without a folder and without a hub."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def bundled_model() -> Path:
    """Return the folder of the bundled model."""
    return Path(__file__).resolve().parent.parent / "assets" / BUNDLED
