"""Readers of tool calls, one for each notation in which models write them.

`JsonCall` reads a JSON object, and passes its arguments on as written. `PythonCalls` reads a list of Python
calls: `[search(query="a", limit=3), stop()]`. `XmlCall` reads tags, as Qwen3.5 writes them:

    <function=search><parameter=query>
    a text
    </parameter></function>

The values in tags are plain text; the tool's schema tells whether one is a string, a number or an object.
All read character by character, and report the events at the top of this file.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class Malformed(Exception):
    """The text is not a call, or not any more. What was not passed on yet is part of the answer's text."""


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


SPACE = " \t\r\n"
JSON_STEPS = {
    ("object", "{"): "key or end",
    ("key or end", '"'): "key",
    ("key or end", "}"): "end",
    ("colon", ":"): "begin",
    ("comma", ","): "key or end",
    ("comma", "}"): "end",
}
"""What `JsonCall` expects after a character, by what it expected before."""


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
        """Go on by one of JSON_STEPS."""
        step = JSON_STEPS.get((self._expects, char))
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


NAME = "_.-:/"
BRACKET_STEPS = {
    ("list", "[", False): "name",
    ("name", "(", True): "key",
    ("key", "=", True): "value",
    ("key", ")", False): "comma",
    ("comma", ",", False): "name",
    ("comma", "]", False): "end",
}
"""What `PythonCalls` expects after a character, by what it expected before and whether a name was read."""
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
        """Go on by one of BRACKET_STEPS."""
        named, (text, self._text) = bool(self._text), (self._text, "")
        step = BRACKET_STEPS.get((self._expects, char, named))
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


FUNCTION, PARAMETER = "<function=", "<parameter="
END_PARAMETER, END_FUNCTION = "</parameter>", "</function>"

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
