"""fovea cluster: fleets of engines."""

from __future__ import annotations

from typing import Any

from fovea.cli.fleet import add_simulate


def register(commands: Any) -> None:
    parser = commands.add_parser("cluster", description=f"{__doc__} docs/cluster.md describes them.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_simulate(actions)
