"""Writes TOML: the configuration files of engines and gateways."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def toml_text(
    values: Mapping[str, Any], tables: Sequence[tuple[str, Mapping[str, Any]]] = (), *, comment: str = ""
) -> str:
    """Return a TOML file.

    values: keys at the top; each value is a text, a number, a boolean, or a list of these.
    tables: entries of arrays of tables, each with the name of its array, in order.
    comment: lines above everything.
    """
    blocks = [_keys(values)]
    blocks += [f"[[{name}]]\n{_keys(table)}" for name, table in tables]
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return head + "\n".join(block for block in blocks if block)


def _keys(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {_value(value)}\n" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, apart from DEL, which JSON does not escape.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"{value!r} has no form in a configuration file")
