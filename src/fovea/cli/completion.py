"""fovea completion SHELL: print the script with which a shell completes commands, flags and values.

  bash:  source <(fovea completion bash)      in ~/.bashrc
  zsh:   source <(fovea completion zsh)       in ~/.zshrc, after compinit
  fish:  fovea completion fish | source       in ~/.config/fish/config.fish

The script asks `fovea` itself at every TAB, so it stays right after an update.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fovea.cli.options import accepts
from fovea.cli.text import HelpFormatter
from fovea.core.names import BUNDLED

SHELLS = ("bash", "zsh", "fish")
MODELS = ("model", "target", "check", "draft_model")
"""Arguments that take a model: its folder, its hub id, or the name of the bundled one."""
_PATHS = re.compile(r"FILE|DIR|PATH|IMAGE|MODEL|DATA|\b(IN|OUT)\b")
"""Placeholders of arguments that take a path."""


def register(commands: Any) -> None:
    parser = commands.add_parser("completion", description=__doc__)
    parser.formatter_class = HelpFormatter
    parser.add_argument("shell", choices=SHELLS, help=f"accepted: {', '.join(SHELLS)}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["fovea"], shell=args.shell))
    return 0


def command_of(line: str) -> list[str]:
    """Return the complete command in a line that is being typed, in a list; empty: it has none yet."""
    words = line.split(" ")[1:]
    return [word for word in words[:-1] if word and not word.startswith("-")][:1]


def complete(parser: argparse.ArgumentParser) -> None:
    """Print what can follow in the line of the shell's variables, and end the process.

    parser: of the command in the line.
    """
    import argcomplete

    for action in _actions(parser):
        if action.choices is None and not hasattr(action, "completer"):
            shown = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            if action.dest in MODELS:
                accepts(action, local_models(), paths=True)
            elif not _PATHS.search(shown):
                accepts(action, ())
    argcomplete.autocomplete(parser, always_complete_options=False)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
        else:
            yield action


def local_models() -> list[str]:
    """Return the names of models that need no download: the bundled one, and hub ids of the local cache."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    names = sorted(folder.name for folder in cache.glob("models--*--*") if (folder / "snapshots").is_dir())
    return [BUNDLED, *(name.removeprefix("models--").replace("--", "/", 1) for name in names)]
