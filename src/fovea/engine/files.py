"""The small JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds; empty when there is no file. Raises CheckpointError for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value
