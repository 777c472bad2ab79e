"""Constraints of a request on its answer: a form that the text has, and tools that the model may call.

A form is JSON, one of several texts, a regular expression or a grammar. The engine only generates tokens that
keep the answer possible in this form (structured output).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fovea.core.errors import InvalidRequest
from fovea.core.json_text import is_nested_deeper

FormatKind = Literal["json", "regex", "choice", "grammar", "calls"]
MAX_DEFINITION = 128 * 1024
"""Longest schema, regular expression, list of choices or grammar, in characters."""
MAX_DEPTH = 48
"""Deepest nesting of objects and lists in a schema. A schema inside another one takes two levels."""
MAX_CHOICES = 1024
MAX_WHITESPACE = 256


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The form of an answer. Use one of the class methods to make one.

    kind: how `definition` is read.
    definition: for "json" the schema as JSON; for "regex" a regular expression that the whole answer matches;
        for "choice" a JSON list of strings; the answer is one of them; for "grammar" a grammar in Lark's
        notation as llguidance reads it, or in GBNF; for "calls" see `calls`.
    whitespace: regular expression of the white space between the parts of JSON. None: the answer is on one
        line, with a space after every comma and colon or without any; the model chooses at the first one.
    param: name of the request's field, for errors.

    Raises InvalidRequest, which names the field.
    """

    kind: FormatKind
    definition: str
    whitespace: str | None = None
    param: str = field(default="format", compare=False)

    def __post_init__(self) -> None:
        if not self.definition:
            raise InvalidRequest(f"{self.param}: the {self.kind} is empty", param=self.param)
        if len(self.definition) > MAX_DEFINITION:
            raise InvalidRequest(
                f"{self.param}: the {self.kind} has {len(self.definition)} characters; "
                f"accepted: at most {MAX_DEFINITION}",
                param=self.param,
            )
        if self.whitespace is not None and len(self.whitespace) > MAX_WHITESPACE:
            raise InvalidRequest(
                f"{self.param}: the pattern of white space has {len(self.whitespace)} characters; "
                f"accepted: at most {MAX_WHITESPACE}",
                param=self.param,
            )

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool | str, *, whitespace: str | None = None, param: str = "format"
    ) -> AnswerFormat:
        """Return the form of JSON that is valid against a JSON Schema (draft 2020-12).

        schema: an object, `true` for any JSON, or the text of one of these.
        """
        if isinstance(schema, str):
            if len(schema) > MAX_DEFINITION:  # before it is parsed
                return cls("json", schema, whitespace, param)
            schema = _parse(schema, param)
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise InvalidRequest(
                f"{param}: a JSON Schema is an object, got {json.dumps(schema)[:64]}", param=param
            )
        _check_depth(schema, param)
        return cls("json", json.dumps(schema, ensure_ascii=False), whitespace, param)

    @classmethod
    def json_object(cls, *, whitespace: str | None = None, param: str = "format") -> AnswerFormat:
        """Return the form of any JSON object."""
        return cls("json", '{"type": "object"}', whitespace, param)

    @classmethod
    def regex(cls, pattern: str, *, param: str = "format") -> AnswerFormat:
        """Return the form of a text that matches a regular expression from its beginning to its end."""
        return cls("regex", pattern, None, param)

    @classmethod
    def choice(cls, choices: Sequence[str], *, param: str = "format") -> AnswerFormat:
        """Return the form of an answer that is one of several texts."""
        usable = not isinstance(choices, str) and all(isinstance(text, str) and text for text in choices)
        if not usable or not 0 < len(choices) <= MAX_CHOICES:
            raise InvalidRequest(f"{param}: accepted: 1 to {MAX_CHOICES} non-empty texts", param=param)
        return cls("choice", json.dumps(list(dict.fromkeys(choices))), None, param)

    @classmethod
    def grammar(cls, text: str, *, param: str = "format") -> AnswerFormat:
        """Return the form of a text of a context-free grammar. It begins at `start`, or in GBNF at `root`."""
        return cls("grammar", text, None, param)

    @classmethod
    def calls(
        cls,
        grammar: str,
        schemas: Mapping[str, tuple[Mapping[str, Any], str]],
        marks: Mapping[str, str],
        starts: Mapping[str, str],
    ) -> AnswerFormat:
        """Return the form of tool calls.

        grammar: in Lark's notation, with rules that it does not define.
        schemas: for each of these rules the JSON Schema of its text, and its place in the request.
        marks: for each of these rules its text, which is a token of its own in some vocabularies.
        starts: rules to be added: `token` if the mark `begin` is a token, else `text`.
        """
        for schema, place in schemas.values():
            _check_depth(schema, place)
        rules = {name: {"schema": schema, "param": place} for name, (schema, place) in schemas.items()}
        definition = json.dumps(
            {"grammar": grammar, "schemas": rules, "marks": dict(marks), "starts": dict(starts)},
            ensure_ascii=False,
        )
        return cls("calls", definition, None, "tools")


def _parse(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: the schema is not JSON: {error}", param=param) from None


def _check_depth(schema: Mapping[str, Any], param: str) -> None:
    """Raise InvalidRequest for a schema that is nested too deeply."""
    if is_nested_deeper(schema, MAX_DEPTH):
        raise InvalidRequest(f"{param}: the schema is nested more than {MAX_DEPTH} levels deep", param=param)


ChoiceMode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client can run.

    name: the model calls it by this name.
    parameters: JSON Schema of the arguments, an object.
    definition: the whole definition in OpenAI's form, as chat templates get it.
    strict: whether arguments must follow the schema also where the model is free to call or not.
    """

    name: str
    parameters: Mapping[str, Any]
    definition: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has made earlier in a conversation.

    arguments: JSON text as the model wrote it, whole or not.
    id: names the call; the message with its result repeats it.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and which calls it allows.

    tools: in the client's order.
    mode: auto: the model decides; none: no call; required: after its reasoning, the answer is calls alone.
    several: whether one answer may make more than one call.
    only: name of the one tool that may be called; "": any.
    """

    tools: tuple[Tool, ...] = ()
    mode: ChoiceMode = "auto"
    several: bool = True
    only: str = ""

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model gets to see."""
        return () if self.mode == "none" else self.tools

    @property
    def callable(self) -> tuple[tuple[Tool, int], ...]:
        """The tools that the answer may call, each with its number in the request."""
        numbered = ((tool, number) for number, tool in enumerate(self.offered))
        return tuple(pair for pair in numbered if self.only in ("", pair[0].name))


NO_TOOLS = ToolUse()
