"""fovea models: the architectures that run."""

from __future__ import annotations

import argparse
from typing import Any


def register(commands: Any) -> None:
    parser = commands.add_parser("models", help="list what can be served", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON array")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/models.md")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from fovea.engine.models.registry import ARCHITECTURES

    if args.json:
        import json
        from dataclasses import asdict

        print(json.dumps([asdict(entry) for entry in ARCHITECTURES]))
    elif args.markdown:
        print(markdown())
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table("model_type", "name", "vision", "text", "for example", box=None)
        for entry in ARCHITECTURES:
            table.add_row(entry.model_type, entry.name, entry.vision, entry.text, entry.example)
        Console().print(table)
    return 0


def markdown() -> str:
    """The support table; docs/models.md holds it, and a test keeps the two equal."""
    from fovea.engine.models.registry import ARCHITECTURES

    lines = ["| model_type | name | vision | text | for example |", "|---|---|---|---|---|"]
    for entry in ARCHITECTURES:
        lines.append(
            f"| `{entry.model_type}` | {entry.name} | {entry.vision} | {entry.text} | {entry.example} |"
        )
    return "\n".join(lines)
