"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, aligned: bool = False, numbers: bool = False
) -> str:
    """Return a Markdown table, without a line break at the end. A `|` in a cell is escaped.

    aligned: columns have equal widths in the text, too, for terminals.
    numbers: all columns but the first are aligned to the right.
    """
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (titles, *rows)]
    if aligned:
        widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
        lines = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        lines.insert(1, ["-" * width for width in widths])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    rule = ["---", *["---:" if numbers else "---"] * (len(titles) - 1)]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, f"|{'|'.join(rule)}|", *body])
