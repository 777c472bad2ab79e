"""Texts of rendered files: TOML for engines and gateways, YAML for Kubernetes, and filled templates."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined


def toml_text(
    values: Mapping[str, Any], tables: Sequence[tuple[str, Mapping[str, Any]]] = (), *, comment: str = ""
) -> str:
    """Return a TOML file.

    values: keys at the top; each value is a text, a number, a boolean, or a list of these.
    tables: entries of arrays of tables, each with the name of its array, in order.
    comment: lines above everything.
    """
    blocks = [_toml_keys(values)]
    blocks += [f"[[{name}]]\n{_toml_keys(table)}" for name, table in tables]
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return head + "\n".join(block for block in blocks if block)


def _toml_keys(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in values.items())


def _toml_value(value: Any) -> str:
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
        return f"[{', '.join(map(_toml_value, value))}]"
    raise TypeError(f"{value!r} has no form in a configuration file")


WIDTH = 110


class _Dumper(yaml.SafeDumper):
    """Writes no anchors, indents lists, and writes texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


def yaml_text(*documents: Mapping[str, Any], comment: str = "") -> str:
    """Return documents as one YAML file; keys keep their order.

    comment: lines above everything.
    """
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    parts = [
        yaml.dump(_plain(document), Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)
        for document in documents
    ]
    return head + "---\n".join(parts)


def _plain(value: Any) -> Any:
    """Return a value of plain dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return value


FOLDER = Path(__file__).with_name("targets")


def fill_template(name: str, /, **values: Any) -> str:
    """Return a template with its values. A value that the template names and nobody gives is an error.

    name: path of the template under the folder of targets, such as "nginx/nginx.conf.j2".
    """
    return _environment().get_template(name).render(values)


def plain_file(name: str) -> str:
    """Return a file that targets render as it is. name: path under the folder of targets."""
    return (FOLDER / name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return environment
