"""Read the small JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dictionary if the file does not exist.

    Raises CheckpointError if the file is not JSON or holds another type.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value
