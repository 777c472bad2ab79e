"""JSON beyond the standard library: the depth of a value, and lines of JSON in files and events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fovea.core.errors import InvalidRequest


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


def one_line(text: str) -> str:
    """Return a JSON text that every reader takes for one line.

    JSON escapes line feeds, but not U+0085, U+2028 and U+2029. Python's `splitlines`, and clients with it,
    end a line there, too. They occur in strings only, so they can be escaped anywhere in the text.
    """
    if text.isascii():
        return text
    return text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def dump(value: Any) -> str:
    """Write a value as JSON on one line, as short as possible. Raises ValueError for NaN and infinity."""
    return one_line(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def is_blank(line: bytes) -> bool:
    """Return whether a line holds nothing but white space, or the mark that editors put before UTF-8."""
    return not line.removeprefix(b"\xef\xbb\xbf").strip()


def parse_object(line: bytes) -> dict[str, Any]:
    """Return the object that a line holds. Raises InvalidRequest."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("not a JSON object")
    return value
