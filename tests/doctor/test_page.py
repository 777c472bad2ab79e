"""docs/doctor.md names every check with its question, and no check that does not exist."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from fovea.cli.doctor import listing
from fovea.cli.main import COMMANDS, build_parser
from fovea.doctor.check import GROUPS
from fovea.doctor.checks import CHECKS

PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()


def test_the_table_is_what_the_command_lists() -> None:
    rows = re.findall(r"^\| `(\w+/[\w-]+)` \| (.+\?) \|$", PAGE, re.M)
    assert [f"{path} {question}" for path, question in rows] == [
        " ".join(line.split(maxsplit=1)) for line in listing(list(CHECKS)).splitlines()
    ]


def test_items_of_the_checklist_lead_to_checks_or_to_a_reason() -> None:
    section = PAGE.split("## The checklist, item by item")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 30
    known = {check.path for check in CHECKS}
    for row in rows:
        named = re.findall(rf"`((?:{'|'.join(GROUPS)})/[\w-]+)`", row)
        assert set(named) <= known, row
        assert named or "not applicable" in row, row


def test_flags_and_commands_in_fixes_exist() -> None:
    """A fix is a line to be copied, so its flags and commands are those of the command line."""
    folder = Path(__file__).parents[2] / "src" / "fovea" / "doctor"
    text = "\n".join(path.read_text() for path in sorted(folder.rglob("*.py")))
    commands = next(
        action
        for action in build_parser(*COMMANDS)._actions
        if isinstance(action, argparse._SubParsersAction)
    ).choices
    flags = {
        flag for name in ("serve", "doctor", "eval", "models", "keys") for flag in _flags(commands[name])
    }
    foreign = {"--query-gpu", "--format"}  # of nvidia-smi
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) <= flags | foreign
    assert set(re.findall(r"(?<=[`\"])fovea ([a-z]+) ", text)) <= set(commands)


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _flags(inner)
