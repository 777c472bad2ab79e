"""Nesting of JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_nested_deeper(value: Mapping[str, Any] | list[Any], levels: int) -> bool:
    """Return whether objects and lists are nested more than `levels` deep, the outermost one counted.

    It works without recursion, so no value is too deep for it.
    """
    level: list[Any] = [value]
    for _ in range(levels):
        level = [
            entry
            for node in level
            for entry in (node.values() if isinstance(node, Mapping) else node)
            if isinstance(entry, Mapping | list)
        ]
        if not level:
            return False
    return True
