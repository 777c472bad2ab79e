"""The command line of the tools that write a file of the package: write it, or compare it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def write_or_check(path: Path, text: Callable[[], str], tool: str, about: str) -> int:
    """Write a file; with --check, compare it instead. Returns 1 if it is not what would be written, else 0.

    text: returns the content. tool: path of the tool, for the message. about: description of the command.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if not parser.parse_args().check:
        path.write_text(text(), encoding="utf-8")
        return 0
    if path.read_text(encoding="utf-8") == text():
        return 0
    print(f"{path.relative_to(ROOT)} is not what {tool} writes", file=sys.stderr)
    return 1
