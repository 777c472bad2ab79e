"""--help of every command and subcommand: 80 columns, groups, accepted values and defaults."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from fovea.cli import main as cli
from tests.cli.support import Caller

MOST_TOGETHER = 14
"""Flags of one group that a reader still finds; more need groups."""


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


def arguments(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """The title of its group, and each argument that the help shows."""
    for group in parser._action_groups:
        for action in group._group_actions:
            hidden = action.help == argparse.SUPPRESS or action.dest == "help"
            if not hidden and not isinstance(action, argparse._SubParsersAction):
                yield group.title or "", action


def explained(action: argparse.Action) -> str:
    return action.help % vars(action) if action.help else ""


@pytest.fixture(params=cli.COMMANDS)
def command(request: pytest.FixtureRequest) -> list[argparse.ArgumentParser]:
    """The parsers of a command and its subcommands."""
    (listed,) = (
        action
        for action in cli.build_parser(request.param)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return list(parsers(listed.choices[request.param]))


def test_every_argument_is_explained(command: list[argparse.ArgumentParser]) -> None:
    for parser in command:
        for _, action in arguments(parser):
            assert explained(action), f"{parser.prog}: {action.dest}"


def test_accepted_values_and_defaults_are_shown(command: list[argparse.ArgumentParser]) -> None:
    for parser in command:
        for _, action in arguments(parser):
            name, text = f"{parser.prog}: {action.dest}", explained(action)
            if action.choices and action.metavar:
                assert all(str(choice) in text for choice in action.choices), name
            if not isinstance(action.default, bool) and action.default:
                assert "default" in text, name


def test_lines_fit_80_columns(command: list[argparse.ArgumentParser]) -> None:
    """Examples and usages of five commands were once longer."""
    for parser in command:
        long = [line for line in parser.format_help().splitlines() if len(line) > 80]
        assert long == [], parser.prog


def test_many_flags_are_in_groups(command: list[argparse.ArgumentParser]) -> None:
    for parser in command:
        titles = [title for title, action in arguments(parser) if action.option_strings]
        assert titles.count("options") <= MOST_TOGETHER, parser.prog


def test_a_setting_shows_what_it_accepts(fovea: Caller) -> None:
    """--dtype once showed TEXT, and its values only in a sentence."""
    words = " ".join(fovea("serve", "--help").out.split())
    assert "(default: auto; accepted: auto, float32, bfloat16, float16)" in words
    assert "--port N Port to listen on. 0: any free port. (default: 8000; accepted: 0 to 65535)" in words


def test_all_commands_are_listed_in_groups(fovea: Caller) -> None:
    outcome = fovea("--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    for title, group in cli.GROUPS.items():
        after = outcome.out.partition(f"\n  {title}:\n")[2]
        assert after.startswith(f"    {next(iter(group))} ")
    assert all(f"\n    {name} " in outcome.out for name in cli.COMMANDS)


@pytest.mark.parametrize("words", [("ask",), ("keys", "new"), ("cluster", "simulate")])
def test_help_is_printed_by_the_command(fovea: Caller, words: tuple[str, ...]) -> None:
    outcome = fovea(*words, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"usage: fovea {' '.join(words)}")
