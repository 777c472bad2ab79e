"""Reads a tool call that is a JSON object, character by character, and passes its arguments on as written."""

from __future__ import annotations

import json
from collections.abc import Iterator

from fovea.dialects.events import ArgumentsText, CallName, End, Event, Malformed, whole_characters

SPACE = " \t\r\n"
STEPS = {
    ("object", "{"): "key or end",
    ("key or end", '"'): "key",
    ("key or end", "}"): "end",
    ("colon", ":"): "begin",
    ("comma", ","): "key or end",
    ("comma", "}"): "end",
}
"""What is expected after a character, by what was expected before it."""


class JsonCall:
    """The reader of one call: `{"name": "...", "arguments": {...}}`, with keys in any order.

    key: key of the arguments.
    """

    def __init__(self, key: str) -> None:
        self._arguments_key = key
        self._expects = "object"
        self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._named = False
        self._early: list[str] = []  # arguments that came before the name
        self._has_arguments = False
        self._seen: set[str] = set()

    def feed(self, char: str) -> Iterator[Event]:
        """Read one character. Raises Malformed if the text cannot be a call."""
        if self._expects == "value":
            yield from self._read_value(char)
        elif self._expects == "key":
            self._value += char
            if self._ends_string(char):
                self._key, self._value, self._expects = _decoded(self._value), "", "colon"
        elif char in SPACE:
            return
        elif self._expects == "begin":
            self._expects = "value"
            yield from self._read_value(char)
        else:
            yield from self._step(char)

    def _step(self, char: str) -> Iterator[Event]:
        """Go on by one of the STEPS."""
        step = STEPS.get((self._expects, char))
        if step is None:
            raise Malformed
        if step == "end":
            yield from self._end()
        self._expects = step
        if step == "key":
            self._value, self._in_string = char, True

    def _read_value(self, char: str) -> Iterator[Event]:
        """Read a character of a value. A number or a word ends before the character that follows it."""
        is_word = self._value and not self._in_string and not self._depth
        if is_word and (char in SPACE or char in ",}"):
            yield from self._end_value()
            yield from self.feed(char)
            return
        if self._value[:1] != "{":  # of an object, only the beginning is needed
            self._value += char
        done = self._closes_value(char)
        if self._key == "name" and self._value[0] != '"':
            raise Malformed
        if self._key == self._arguments_key:
            if self._value[0] not in '{"n':
                raise Malformed
            if self._value[0] == "{" and self._key not in self._seen:
                yield from self._pass_on(char)
        if done:
            yield from self._end_value()

    def _closes_value(self, char: str) -> bool:
        """Whether a character closes a string, an object or a list that is the whole value."""
        if self._in_string:
            return self._ends_string(char) and not self._depth
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth < 0:
                raise Malformed
            return not self._depth
        return False

    def _end_value(self) -> Iterator[Event]:
        """Use a value. Of a key that occurs twice, the first one counts."""
        is_new = self._key not in self._seen
        self._seen.add(self._key)
        if self._key == "name" and is_new:
            self._named = True
            yield CallName(_decoded(self._value))
            if self._early:
                yield ArgumentsText("".join(self._early))
        elif self._key == self._arguments_key and self._value[0] != "{":
            text = _decoded(self._value) if self._value != "null" else ""
            if text and is_new:
                yield from self._pass_on(whole_characters(text))
        self._value, self._expects = "", "comma"

    def _pass_on(self, text: str) -> Iterator[Event]:
        self._has_arguments = True
        if self._named:
            yield ArgumentsText(text)
        else:
            self._early.append(text)

    def _end(self) -> Iterator[Event]:
        if not self._named:
            raise Malformed
        if not self._has_arguments:
            yield ArgumentsText("{}")
        yield End()

    def _ends_string(self, char: str) -> bool:
        """Whether a character is the quote that ends a string. Keeps track of escapes."""
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False


def _decoded(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(value, str):
        raise Malformed
    return value
