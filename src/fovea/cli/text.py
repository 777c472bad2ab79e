"""Texts and tables that fit the terminal: no line is cut, and none is longer than the terminal is wide."""

from __future__ import annotations

import argparse
import itertools
import shutil
import textwrap
from collections.abc import Iterable, Sequence


class HelpFormatter(argparse.HelpFormatter):
    """Fills the paragraphs of a description; lines that begin with spaces, such as examples, stay lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = []
        for is_prose, lines in itertools.groupby(text.splitlines(), lambda line: line[:1].strip() != ""):
            if is_prose:
                parts.append(textwrap.fill(" ".join(lines), width, break_on_hyphens=False))
            else:
                parts.append(fitted("\n".join(lines), width))
        return "\n".join(parts)


def wrapped(text: str, width: int, first: str = "", later: str | None = None) -> list[str]:
    """Break a text into lines. Characters that a terminal would not print are replaced.

    first, later: beginnings of the first line and of the others; None: spaces below `first`.
    """
    plain = "".join(char if char.isprintable() else "?" for char in text)
    indent = " " * len(first) if later is None else later
    lines = textwrap.wrap(
        plain, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
    )
    return lines or [first.rstrip()]


def terminal_columns(otherwise: int = 80) -> int:
    """Return COLUMNS, or the width of the terminal. otherwise: the width if the output is no terminal."""
    return shutil.get_terminal_size((otherwise, 24)).columns


def list_line(line: str) -> str:
    """Return a line of a list, wrapped on a terminal alone: `grep` and other programs get it whole."""
    return fitted(line, terminal_columns(otherwise=1 << 20))


def fitted(text: str, width: int | None = None) -> str:
    """Return a text whose longer lines are wrapped, with a deeper indent from their second line on.

    width: columns; None: those of the terminal. A longer word, such as a path, stays whole.
    """
    columns = width or terminal_columns()
    lines: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        parts = textwrap.wrap(
            line.strip(), columns, initial_indent=indent, subsequent_indent=f"{indent}    ",
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip
        lines += parts if len(line) > columns else [line]
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return rows as lines: the first column begins at the left, the others end at the same places.

    width: columns; None: those of the terminal. A wider table is written in parts, each with the first
        column.
    """
    columns = width or terminal_columns()
    first, *others = zip(*rows, strict=True)
    parts: list[list[tuple[str, ...]]] = [[first]]
    used = start = _widest(first)
    for column in others:
        used += 2 + _widest(column)
        if used > columns and len(parts[-1]) > 1:
            parts.append([first])
            used = start + 2 + _widest(column)
        parts[-1].append(column)
    return "\n\n".join(_aligned(part) for part in parts)


def _widest(cells: Iterable[str]) -> int:
    return max(map(len, cells))


def _aligned(columns: Sequence[Sequence[str]]) -> str:
    widths = [_widest(column) for column in columns]
    lines = []
    for first, *others in zip(*columns, strict=True):
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
