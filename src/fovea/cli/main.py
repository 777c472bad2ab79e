"""The `fovea` command."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import textwrap
from collections.abc import Sequence

from fovea import __version__
from fovea.core.errors import FoveaError

GROUPS: dict[str, dict[str, str]] = {
    "ask a model": {
        "ask": "ask one question about images or videos",
        "chat": "talk about images in the terminal",
        "batch": "answer a file of questions, or a question about each image of a folder",
        "eval": "score a model on scenes or on your own questions",
    },
    "serve": {
        "serve": "start the OpenAI-compatible server",
        "ui": "open the page of a server in the browser",
        "gateway": "route requests to OpenAI-compatible engines, with limits, caches and fallbacks",
        "cluster": "run engines on a cluster of Ray, or simulate a fleet: up, status, down, simulate",
    },
    "look after servers": {
        "caches": "show or clear a server's caches",
        "metrics": "list the metrics, or check those of a server",
        "keys": "make, list and revoke keys of a keys file",
        "usage": "print usage and costs from a gateway's usage file",
        "experiment": "list, show and decide the A/B experiments of a gateway",
    },
    "plan and deploy": {
        "plan": "predict memory, speed and cost, and recommend hardware",
        "advise": "which inference engine suits a situation",
        "deploy": "render containers, proxies, Kubernetes, Triton and cloud artefacts from one spec",
        "doctor": "check a machine, a model or a server before production",
    },
    "measure": {
        "bench": "measure an OpenAI-compatible server under load",
        "profile": "where the time of a request goes, stage by stage",
        "simulate": "compare scheduling policies on a virtual clock",
    },
    "prepare models": {
        "models": "list the supported models",
        "build": "compile the vision encoder for given resolutions",
        "quantize": "write a quantized copy of a checkpoint, calibrated on images and texts",
        "relevance": "choose the heads with which a model looks for what a question is about",
    },
    "this command": {"completion": "print the script with which bash, zsh or fish complete commands"},
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
"""The commands with their help. Each has a module of its name."""
_MODULES = {"eval": "evaluate"}
"""Modules with another name than their command."""


def build_parser(*commands: str) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    commands: the commands that it can parse; it only lists the others. Their modules alone are imported,
        because all of them take more than a second.
    """
    parser = argparse.ArgumentParser(
        prog="fovea",
        description="Serve vision-language models: seeing more where it matters.",
        formatter_class=_Grouped,
    )
    parser.add_argument("--version", action="version", version=f"fovea {__version__}")
    listed = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, text in COMMANDS.items():
        if name in commands:
            importlib.import_module(f"fovea.cli.{_MODULES.get(name, name)}").register(listed)
        else:
            listed.add_parser(name, help=text)
    return parser


class _Grouped(argparse.HelpFormatter):
    """Lists the commands by their groups."""

    def add_argument(self, action: argparse.Action) -> None:
        if not isinstance(action, argparse._SubParsersAction):
            super().add_argument(action)
            return
        for title, commands in GROUPS.items():
            lines = [f"  {title}:"]
            for name, text in commands.items():
                lines += textwrap.wrap(
                    text, self._width, initial_indent=f"    {name:12}", subsequent_indent=" " * 16
                )
            self._add_item("\n".join, [[*lines, ""]])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns 0 if it succeeded, 1 if a part failed, 2 for wrong arguments, 130 if interrupted.
    """
    # These keep tokenizers from starting threads of their own, and transformers from printing warnings.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # an answer may contain characters that the locale cannot write
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except FoveaError as error:
        for each in getattr(error, "findings", (error,)):
            print(f"fovea: {' '.join(each.message.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fovea: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe. At exit Python would fail to flush what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: Sequence[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:  # the script of `fovea completion` calls this program at every TAB
        from fovea.cli import completion

        line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
        completion.complete(build_parser(*completion.command_of(line)))
    parser = build_parser(*[word for word in argv if not word.startswith("-")][:1])
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    args, rest = parser.parse_known_args(argv)
    if rest:
        # argparse ends a list of words at the first flag; `ask a.png --stats "what is it?"` means both words.
        if not hasattr(args, "words") or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}{_nearest(parser, args.command, rest)}")
        args.words += rest
    _log_warnings()
    code: int = args.run(args)
    sys.stdout.flush()
    return code


def _nearest(parser: argparse.ArgumentParser, command: str, words: Sequence[str]) -> str:
    """Return the flags of a command that resemble unknown ones, as the end of a message."""
    from fovea.core.config_files import nearest

    known = {
        flag
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for one in action.choices[command]._actions
        if one.help != argparse.SUPPRESS
        for flag in one.option_strings
    }
    hints = [nearest(word.partition("=")[0], known) for word in words if word.startswith("--")]
    return "".join(f"; {hint}" for hint in hints if hint.startswith("did"))


def _log_warnings() -> None:
    """Log warnings and errors of all libraries. The configured log level applies to Fovea alone.

    Its imports take half of the time that --version and --help would need with them.
    """
    import logging

    from fovea.observe.logs import TEXT

    logging.basicConfig(level="WARNING", format=TEXT, stream=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
