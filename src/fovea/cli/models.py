"""fovea models: list the supported architectures, check a checkpoint, or count visual tokens."""

from __future__ import annotations

import argparse
from typing import Any

from fovea.core.errors import ConfigError

COLUMNS = ("model_type", "name", "vision", "text", "example")


def register(commands: Any) -> None:
    parser = commands.add_parser("models", description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON instead of a table")
    form.add_argument("--markdown", action="store_true", help="the table as in docs/models.md")
    parser.add_argument(
        "--check",
        metavar="MODEL",
        help="say whether a folder, or a hub id in the local cache, would load, and what is missing; "
        "no weight is read and nothing is downloaded; exit code 1: it would not load",
    )
    parser.add_argument(
        "--tokens",
        metavar="WIDTHxHEIGHT",
        help="print the visual tokens of an image of this size in pixels (or of several sizes: A,B) for the "
        "models named, or for all known ones; exit code 1: a model is not known, or refuses the size",
    )
    parser.add_argument(
        "model",
        nargs="*",
        metavar="MODEL",
        help="with --tokens: known hub ids, or folders with the settings of a checkpoint",
    )
    parser.add_argument(
        "--revision", default="", metavar="NAME", help="with --check: branch, tag or commit of a hub id"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.check is not None and args.tokens is not None:
        raise ConfigError("--check and --tokens print different tables; give one of them", param="tokens")
    if args.model and args.tokens is None:
        raise ConfigError(f"{args.model[0]!r} needs --tokens or --check before it", param="model")
    if args.check is not None:
        return check(args)
    if args.revision:
        raise ConfigError("--revision is for --check", param="revision")
    if args.tokens is not None:
        return tokens(args)
    from fovea.engine.models.registry import ARCHITECTURES

    if args.json:
        import json

        print(json.dumps([{name: getattr(entry, name) for name in COLUMNS} for entry in ARCHITECTURES]))
    elif args.markdown:
        print(markdown())
    else:
        print(listing())
    return 0


def tokens(args: argparse.Namespace) -> int:
    """Print the visual tokens of known models. Returns 0 if all were counted, else 1."""
    from fovea.cli import token_table

    sizes = token_table.parse_sizes(args.tokens)
    if args.markdown:
        if args.model:
            raise ConfigError(
                "--markdown prints all known models; accepted: no model beside it", param="model"
            )
        print(token_table.markdown(sizes))
        return 0
    found = token_table.rows(args.model, sizes)
    print(token_table.as_json(found, sizes) if args.json else token_table.table(found, sizes))
    return 1 if any(row.problem for row in found) else 0


def check(args: argparse.Namespace) -> int:
    """Print the report of a checkpoint. Returns 0 if it would load, else 1."""
    if args.markdown:
        raise ConfigError("--markdown is for the list of models; --check prints a table or --json")
    from fovea.cli.check_table import table
    from fovea.engine.check import check_checkpoint

    report = check_checkpoint(args.check, args.revision)
    if args.json:
        import json

        print(json.dumps(report.as_json()))
    else:
        print(table(report))
    return 0 if report.loads else 1


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
