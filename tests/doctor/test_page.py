"""docs/doctor.md describes every group of checks, and names no check that does not exist."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from fovea.cli.main import COMMANDS, build_parser
from fovea.doctor.check import GROUPS
from fovea.doctor.checks import CHECKS

PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()


def test_the_page_describes_every_group_and_no_other() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == GROUPS


def test_every_check_that_the_page_names_exists() -> None:
    named = set(re.findall(rf"`((?:{'|'.join(GROUPS)})/[\w-]+)`", PAGE))
    assert named
    assert named <= {check.path for check in CHECKS}


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
