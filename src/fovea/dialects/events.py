"""The events that readers of tool calls report."""

from __future__ import annotations

from dataclasses import dataclass


class Malformed(Exception):
    """The text is no call, or no longer one. What was not passed on yet is part of the answer's content."""


def whole_characters(text: str) -> str:
    """Join halves of surrogate pairs. A half without the other, which no text can hold, is replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclass(frozen=True, slots=True)
class CallName:
    """A call begins. name: of the tool."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """The next piece of the JSON text of the call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """A call is complete (JSON, XML), or a whole list of calls is (Python)."""


Event = CallName | ArgumentsText | End
