"""Lines of JSON files: one object each."""

from __future__ import annotations

import json
from typing import Any

from fovea.core.errors import InvalidRequest


def parse_object(line: bytes) -> dict[str, Any]:
    """Return the object that a line holds. Raises InvalidRequest."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("not a JSON object")
    return value
