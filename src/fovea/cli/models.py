"""fovea models: list the supported architectures."""

from __future__ import annotations

import argparse
from typing import Any

COLUMNS = ("model_type", "name", "vision", "text", "example")


def register(commands: Any) -> None:
    parser = commands.add_parser("models", help="list the supported models", description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON array")
    form.add_argument("--markdown", action="store_true", help="the table of docs/models.md")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from fovea.engine.models.registry import ARCHITECTURES

    if args.json:
        import json

        print(json.dumps([{name: getattr(entry, name) for name in COLUMNS} for entry in ARCHITECTURES]))
    elif args.markdown:
        print(markdown())
    else:
        print(listing())
    return 0


def listing() -> str:
    """Return two lines per architecture, none wider than 80 columns."""
    from fovea.engine.models.registry import ARCHITECTURES

    width = max(len(text) for entry in ARCHITECTURES for text in (entry.name, entry.model_type)) + 2
    lines = []
    for entry in ARCHITECTURES:
        lines.append(f"{entry.name:{width}}{entry.example}")
        lines.append(f"{entry.model_type:{width}}{entry.vision}; {entry.text}")
    lines.append("")
    lines.append("A model is a folder, a hub id of one of these, or fovea-tiny (installed).")
    return "\n".join(lines)


def markdown() -> str:
    """Return the table of docs/models.md. A test keeps the two equal."""
    from fovea.engine.models.registry import ARCHITECTURES

    lines = ["| model_type | name | vision | text | for example |", "|---|---|---|---|---|"]
    for entry in ARCHITECTURES:
        lines.append(
            f"| `{entry.model_type}` | {entry.name} | {entry.vision} | {entry.text} | {entry.example} |"
        )
    return "\n".join(lines)
