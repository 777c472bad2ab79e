"""The `fovea` command."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from fovea import __version__
from fovea.core.errors import FoveaError

COMMANDS = ("ask", "chat", "serve", "batch", "evaluate", "models")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fovea", description="Serve vision-language models: seeing more where it matters."
    )
    parser.add_argument("--version", action="version", version=f"fovea {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"fovea.cli.{name}").register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 some of it failed, 2 the call or its settings are wrong, 130 interrupted."""
    # Models never need the network once they are on disk, and nobody asked for progress bars of downloads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    args = build_parser().parse_args(argv)
    level = (getattr(args, "log_level", None) or os.environ.get("FOVEA_LOG_LEVEL") or "info").upper()
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname).1s %(name)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        code: int = args.run(args)
    except FoveaError as error:
        print(f"fovea: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
