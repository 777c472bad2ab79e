"""Tables of the planner's pages."""

from __future__ import annotations

from collections.abc import Sequence


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, without a line break at the end. A `|` in a cell is escaped."""
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    return "\n".join(lines)


def number(value: float) -> str:
    """Return a number with separators of thousands, and with decimals only if it has any."""
    return f"{value:,.2f}".rstrip("0").rstrip(".")
