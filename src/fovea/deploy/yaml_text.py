"""Writes YAML: manifests of Kubernetes and values of charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

WIDTH = 110


class _Dumper(yaml.SafeDumper):
    """Writes no anchors, indents lists, and writes texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


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
