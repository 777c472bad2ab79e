"""The events that readers of tool calls report."""

from __future__ import annotations

from dataclasses import dataclass


class Malformed(Exception):
    """The text cannot be a call. It is part of the answer's content then."""


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
    """The call is complete, or all calls of one pair of marks are."""


Event = CallName | ArgumentsText | End
