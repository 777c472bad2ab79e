"""Shortens text from clients before it becomes part of a message."""

from __future__ import annotations

MOST = 100
"""Characters of a client's text that a message shows."""


def quote(text: str) -> str:
    """Return a text in quotes, with control characters escaped. A long one keeps its first MOST characters.

    A client that sent 8 KB would otherwise get all of it back, and the log would hold it, too.
    """
    return repr(text if len(text) <= MOST else f"{text[:MOST]}...")
