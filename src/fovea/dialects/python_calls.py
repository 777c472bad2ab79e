"""Reads tool calls that are written as a list of Python calls: `[search(query="a", limit=3), stop()]`."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator
from typing import Any

from fovea.dialects.events import ArgumentsText, CallName, End, Event, Malformed, whole_characters

SPACE = " \t\r\n"
NAME = "_.-:/"
STEPS = {
    ("list", "[", False): "name",
    ("name", "(", True): "key",
    ("key", "=", True): "value",
    ("key", ")", False): "comma",
    ("comma", ",", False): "name",
    ("comma", "]", False): "end",
}
"""What is expected after a character, by what was expected before it and whether a name was read."""
LONGEST_NAME = 256
CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's words, which models mix with Python's."""


class PythonCalls:
    """The reader of one list of calls. Each argument is passed on, as JSON, when it is complete."""

    def __init__(self) -> None:
        self._expects = "list"
        self._text = ""
        self._key = ""
        self._count = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, char: str) -> Iterator[Event]:
        """Read one character. Raises Malformed if the text cannot be such a list."""
        if self._expects == "value":
            yield from self._read_value(char)
        elif self._expects in ("name", "key") and (char.isalnum() or char in NAME):
            self._text += char
            if len(self._text) > LONGEST_NAME:
                raise Malformed
        elif char not in SPACE:
            yield from self._step(char)

    def _step(self, char: str) -> Iterator[Event]:
        """Go on by one of the STEPS."""
        named, (text, self._text) = bool(self._text), (self._text, "")
        step = STEPS.get((self._expects, char, named))
        if step is None:
            raise Malformed
        self._expects = step
        if char == "(":
            self._count = 0
            yield CallName(text)
        elif char == "=":
            self._key = text
        elif char == ")":
            yield from self._end_call()
        elif step == "end":
            yield End()

    def _read_value(self, char: str) -> Iterator[Event]:
        if self._quote:
            self._text += char
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
            return
        if not self._depth and char in ",)":
            value = whole_characters(json.dumps(_value(self._text), ensure_ascii=False))
            yield ArgumentsText(f"{', ' if self._count else '{'}{json.dumps(self._key)}: {value}")
            self._count += 1
            self._text = ""
            if char == ",":
                self._expects = "key"
            else:
                yield from self._end_call()
            return
        self._text += char
        if char in "'\"":
            self._quote = char
        elif char in "[{(":
            self._depth += 1
        elif char in "]})":
            self._depth -= 1

    def _end_call(self) -> Iterator[Event]:
        yield ArgumentsText("}" if self._count else "{}")
        self._expects = "comma"


def _value(source: str) -> Any:
    """Return the value of a Python or a JSON literal. Raises Malformed for anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(source.strip(), mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in CONSTANTS:
                raise Malformed
        value = ast.literal_eval(_Constants().visit(tree))
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise Malformed from None
    return value


class _Constants(ast.NodeTransformer):
    """Replaces JSON's words by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.copy_location(ast.Constant(CONSTANTS[node.id]), node)
