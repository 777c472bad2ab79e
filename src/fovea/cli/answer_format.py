"""The flags that set the form of an answer: --schema, --choice, --regex and --grammar."""

from __future__ import annotations

import argparse
from pathlib import Path

from fovea.core.constraints import AnswerFormat
from fovea.core.errors import InvalidRequest


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags. At most one of them can be given."""
    group = parser.add_argument_group("form of the answer").add_mutually_exclusive_group()
    group.add_argument(
        "--schema",
        type=Path,
        metavar="FILE",
        help="the answer is JSON that is valid against this JSON Schema",
    )
    group.add_argument("--choice", metavar="A,B,...", help="the answer is one of these texts")
    group.add_argument("--regex", metavar="PATTERN", help="the whole answer matches this regular expression")
    group.add_argument(
        "--grammar",
        type=Path,
        metavar="FILE",
        help="the answer follows this grammar, in Lark's notation or GBNF",
    )


def answer_format(args: argparse.Namespace) -> AnswerFormat | None:
    """Return the form that the flags set; None: any text. Raises InvalidRequest."""
    if args.schema is not None:
        return AnswerFormat.json_schema(_read(args.schema, "--schema"), param="--schema")
    if args.choice is not None:
        choices = [text.strip() for text in args.choice.split(",")]
        return AnswerFormat.choice(choices, param="--choice")
    if args.regex is not None:
        return AnswerFormat.regex(args.regex, param="--regex")
    if args.grammar is not None:
        return AnswerFormat.grammar(_read(args.grammar, "--grammar"), param="--grammar")
    return None


def _read(path: Path, flag: str) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{flag}: {path} cannot be read: {error.strerror}", param=flag) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{flag}: {path} is not UTF-8 text", param=flag) from error
