"""The lines of a TOML text in which its tables and keys begin, which the standard library does not tell."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

At = tuple[str | int, ...]
_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]#]+?)\s*\]\]?\s*(#.*)?$")
_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_PART = re.compile(_NAME)
_KEY = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")
_QUOTES = re.compile(r"\"{3}|'{3}")


@functools.lru_cache(maxsize=8)
def toml_lines(text: str) -> Mapping[At, int]:
    """Return the line of every table and key by its place: ("pool", 2, "name") is in the second [[pool]].

    Tables within a line (`{ name = "a" }`) are not looked into; their key has a place.
    """
    lines: dict[At, int] = {}
    counts: dict[At, int] = {}
    here: At = ()
    quoted = False
    for number, line in enumerate(text.splitlines(), 1):
        if not quoted:
            if header := _HEADER.match(line):
                here = _table(_parts(header[2]), header[1] == "[[", counts)
                lines.setdefault(here, number)
            elif key := _KEY.match(line):
                place = here
                for part in _parts(key[1]):
                    place = (*place, part)
                    lines.setdefault(place, number)
        if quoted or not line.lstrip().startswith("#"):
            quoted ^= len(_QUOTES.findall(line)) % 2 == 1
    return lines


def _parts(name: str) -> list[str]:
    return [part.strip("\"'") for part in _PART.findall(name)]


def _table(parts: list[str], is_array: bool, counts: dict[At, int]) -> At:
    """Return the place of a table: after a name of an array of tables comes the number of its last one."""
    place: At = ()
    for index, part in enumerate(parts):
        place = (*place, part)
        if is_array and index == len(parts) - 1:
            counts[place] = counts.get(place, 0) + 1
        if place in counts:
            place = (*place, counts[place])
    return place
