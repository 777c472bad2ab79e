"""The `fovea` command."""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence

from fovea import __version__
from fovea.core.errors import FoveaError
from fovea.observe.logs import TEXT

COMMANDS = (
    "ask",
    "chat",
    "serve",
    "ui",
    "gateway",
    "batch",
    "evaluate",
    "models",
    "caches",
    "metrics",
    "keys",
    "usage",
    "experiment",
    "deploy",
    "plan",
    "doctor",
    "advise",
    "simulate",
    "bench",
    "profile",
    "build",
)
"""The commands, by the names of their modules."""
_MODULES = {"eval": "evaluate"}


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """Return the parser of the command line.

    command: the command that is given. Only its module is imported, because all of them take half a second.
        With "", or a text that is no command, the parser has all commands.
    """
    parser = argparse.ArgumentParser(
        prog="fovea", description="Serve vision-language models: seeing more where it matters."
    )
    parser.add_argument("--version", action="version", version=f"fovea {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    module = _MODULES.get(command, command)
    for name in (module,) if module in COMMANDS else COMMANDS:
        importlib.import_module(f"fovea.cli.{name}").register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns 0 if it succeeded, 1 if a part failed, 2 for wrong arguments, 130 if interrupted.
    """
    # These keep tokenizers from starting threads of their own, and transformers from printing warnings.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # The configured log level applies to Fovea alone. Libraries log warnings and errors.
    logging.basicConfig(level="WARNING", format=TEXT, stream=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # an answer may contain characters that the locale cannot write
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except FoveaError as error:
        print(f"fovea: {' '.join(error.message.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fovea: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe. At exit Python would fail to flush what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: Sequence[str]) -> int:
    parser = build_parser(argv[0] if argv else "")
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    args, rest = parser.parse_known_args(argv)
    if rest:
        # argparse ends a list of words at the first flag; `ask a.png --stats "what is it?"` means both words.
        if not hasattr(args, "words") or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.words += rest
    code: int = args.run(args)
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
