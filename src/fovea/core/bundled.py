"""The model that comes with Fovea."""

from __future__ import annotations

from pathlib import Path

BUNDLED = "fovea-tiny"
"""Name under which it is found without a folder and without a hub."""


def bundled_model() -> Path:
    """Return its folder."""
    return Path(__file__).resolve().parent.parent / "assets" / BUNDLED
