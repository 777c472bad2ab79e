"""Reads a tool call that is written in tags, as Qwen3.5 writes it.

    <function=search><parameter=query>
    a text
    </parameter></function>

Values are plain text; whether one is a string, a number or an object is told by the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fovea.dialects.events import ArgumentsText, CallName, End, Event, Malformed

SPACE = " \t\r\n"
FUNCTION, PARAMETER = "<function=", "<parameter="
END_PARAMETER, END_FUNCTION = "</parameter>", "</function>"
LONGEST_NAME = 256
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class XmlCall:
    """The reader of one call. Strings are passed on while they are written, other values when complete.

    tools: schema of the parameters of each tool, by its name.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._tools = tools
        self._properties: Mapping[str, Any] = {}
        self._expects = FUNCTION
        self._text = ""
        self._types: frozenset[str] = frozenset()
        self._count = 0
        self._streams = self._begun = False

    def feed(self, char: str) -> Iterator[Event]:
        """Read one character. Raises Malformed if the text cannot be a call."""
        if self._expects == "value":
            yield from self._read_value(char)
            return
        if not self._text and char in SPACE:
            return
        self._text += char
        if self._expects == FUNCTION:
            name = self._tag(FUNCTION)
            if name is not None:
                parameters = self._tools.get(name, {}).get("properties", {})
                self._properties = parameters if isinstance(parameters, Mapping) else {}
                self._expects = PARAMETER
                yield CallName(name)
        elif self._text == END_FUNCTION:
            yield ArgumentsText("}" if self._count else "{}")
            yield End()
        elif not END_FUNCTION.startswith(self._text):
            key = self._tag(PARAMETER)
            if key is not None:
                yield from self._begin_value(key)

    def _tag(self, opening: str) -> str | None:
        """Return the name in a tag that is complete now, and forget its text; None: it is not complete."""
        if not self._text.startswith(opening[: len(self._text)]) or len(self._text) > LONGEST_NAME:
            raise Malformed
        if not self._text.endswith(">"):
            return None
        name, self._text = self._text[len(opening) : -1].strip(), ""
        if not name:
            raise Malformed
        return name

    def _begin_value(self, key: str) -> Iterator[Event]:
        self._types = types_of(self._properties.get(key))
        self._streams = self._types == {"string"}
        self._expects, self._begun = "value", False
        yield ArgumentsText(f"{', ' if self._count else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._count += 1
        if self._streams:
            yield ArgumentsText('"')

    def _read_value(self, char: str) -> Iterator[Event]:
        """Read a character of a value. A line break after the opening tag, and one before the closing tag,
        are not part of it.
        """
        if not self._begun:
            self._begun = True
            if char == "\n":
                return
        self._text += char
        if self._text.endswith(END_PARAMETER):
            value = self._text[: -len(END_PARAMETER)].removesuffix("\n")
            self._text, self._expects = "", PARAMETER
            yield ArgumentsText(_escaped(value) + '"' if self._streams else _json(value, self._types))
        elif self._streams:
            kept = _tail(self._text)
            if kept < len(self._text):
                ready, self._text = self._text[: len(self._text) - kept], self._text[len(self._text) - kept :]
                yield ArgumentsText(_escaped(ready))


def _tail(text: str) -> int:
    """Length of the end of a text that may belong to the closing tag, or be the line break before it."""
    closing = "\n" + END_PARAMETER
    for length in range(min(len(text), len(closing)), 0, -1):
        end = text[-length:]
        if closing.startswith(end) or END_PARAMETER.startswith(end):
            return length
    return 0


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: as it is if it is JSON of one of the types, else as a string.

    Some models write true, false and null as Python does.
    """
    if text.strip() in PYTHON_WORDS and (types & {"boolean", "null"}):
        text = PYTHON_WORDS[text.strip()]
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if value is not None and types and types <= {"string", "null"}:
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _refuse(word: str) -> Any:
    raise ValueError(word)


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it names them; empty: it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    types = set(filter(lambda name: isinstance(name, str), _listed(schema.get("type"))))
    for part in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        inner = types_of(part)
        if not inner:
            return frozenset()
        types |= inner
    values = _listed(schema.get("enum"))
    if not types and values and all(isinstance(value, str) for value in values):
        types = {"string"}
    return frozenset(types)


def _listed(value: Any) -> list[Any]:
    """A value as a list, whatever a client has put there."""
    return value if isinstance(value, list) else [] if value is None else [value]
