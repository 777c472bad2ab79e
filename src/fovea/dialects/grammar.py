"""Grammars of tool calls in each dialect, for requests in which a call is required.

A grammar is written in Lark's notation. The arguments of each tool are a rule of their own, for which the
engine puts in the grammar of the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fovea.core.answer_format import AnswerFormat
from fovea.core.errors import InvalidRequest
from fovea.core.tools import Tool, ToolUse
from fovea.dialects.dialect import Dialect, ToolFormat
from fovea.dialects.xml_call import END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER, types_of

ANYTHING: Mapping[str, Any] = {"type": "object"}
NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
Schemas = dict[str, tuple[Mapping[str, Any], str]]
"""Rules whose grammar is that of a schema: name to the schema and its place in the request."""


def request_format(use: ToolUse, answer: AnswerFormat | None, dialect: Dialect) -> AnswerFormat | None:
    """Return the form of an answer that may call tools; None: any text.

    answer: the form that the request sets for answers without calls.

    Raises InvalidRequest if the model makes no calls, or if the two forms exclude each other.
    """
    if not use.offered:
        return answer
    if dialect.tools is None:
        raise InvalidRequest(
            "this model makes no tool calls that this server can read; see the setting tool_format",
            param="tools",
            code="unsupported_field",
        )
    if use.mode == "required" and answer is not None:
        raise InvalidRequest(
            f"{answer.param} and a required tool call exclude each other; send tool_choice auto or none",
            param="tool_choice",
        )
    if answer is not None and answer.kind != "json":
        raise InvalidRequest(
            f"{answer.param}: beside tools, only JSON is accepted as the form of the answer",
            param=answer.param,
        )
    strict = any(tool.strict for tool in use.offered)
    if use.mode == "auto" and answer is None and not strict:
        return None
    places = [
        (tool if use.mode == "required" or tool.strict else replace(tool, parameters=ANYTHING), number)
        for tool, number in use.callable
    ]
    tools = [(tool, f"tools[{number}].function.parameters") for tool, number in places]
    final = None if answer is None else (json.loads(answer.definition), answer.param)
    free = use.mode == "auto" and answer is None
    return calls_format(dialect.tools, tools, several=use.several, free=free, final=final)


def calls_format(
    form: ToolFormat,
    tools: Sequence[tuple[Tool, str]],
    *,
    several: bool,
    free: bool = False,
    final: tuple[Mapping[str, Any], str] | None = None,
) -> AnswerFormat:
    """Return the form of an answer that calls tools.

    tools: those that may be called, each with the place of its schema in the request, for errors.
    several: whether it may make more than one call.
    free: whether it may write text before the calls, or make none.
    final: schema of the answer if it makes no call, with its place; None: it makes one.
    """
    schemas: Schemas = {}
    if final is not None:
        schemas["final"] = final
    write = {"json": _json_call, "python": _python_call, "xml": _xml_call}[form.notation]
    rules: list[str] = []
    names = []
    for number, (tool, place) in enumerate(tools):
        rules.append(f"tool{number}: {write(form, tool, number, place, schemas, rules)}")
        names.append(f"tool{number}")
    rules.append(f"any: {' | '.join(names)}")
    rules += _around(form, several, free and bool(form.begin))
    if not (free and form.begin):
        rules.append("start: calls" + (" | final" if final is not None else ""))
    return AnswerFormat.calls("\n".join(rules) + "\n", schemas)


def _around(form: ToolFormat, several: bool, free: bool) -> list[str]:
    """The rules of what stands around `any`, a call: marks, other calls, and text before them.

    An answer with text before its calls is text up to the first mark and the mark, and then the rest.
    """
    begin, end = _text(form.begin), _text(form.end)
    edge = "BREAK?" if form.newline else ""
    if form.notation == "python":
        calls = '"[" any' + (' ("," " "? any)*' if several else "") + ' "]"'
        marked, bare, more = f"{calls} {end}", calls, ""
    else:
        marked, bare = f"{edge} any {edge} {end}", "any"
        one = bare if form.bare else f"{begin} {marked}"
        more = f"({_text(form.several)} {one})*" if several else ""
    first = bare if form.bare else f"{begin} {marked}"
    rules = ["BREAK: /\\n/", f"calls: {first} {more}"]
    if not free:
        return rules
    other = f"/(?s:.*)/ & ~/(?s:.*){_literal(form.begin)}(?s:.*)/"
    return [
        *rules,
        f"PROSE: {other}",
        f"before[suffix={begin}]: /(?s:.*)/",
        f"start: PROSE | before {marked} {more}",
    ]


def _literal(text: str) -> str:
    """A text as a regular expression of Lark's notation."""
    return re.escape(text).replace("/", r"\/")


def _json_call(
    form: ToolFormat, tool: Tool, number: int, place: str, schemas: Schemas, rules: list[str]
) -> str:
    schemas[f"arguments{number}"] = (tool.parameters or NOTHING, place)
    head = f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": '
    return f"{_text(head)} arguments{number} {_text('}')}"


def _python_call(
    form: ToolFormat, tool: Tool, number: int, place: str, schemas: Schemas, rules: list[str]
) -> str:
    """A call with its required arguments first, in the schema's order, and then any of the others."""
    required: list[str] = []
    optional: list[str] = []
    for index, (name, schema, needed) in enumerate(_properties(tool)):
        rule = f"value{number}_{index}"
        words = types_of(schema)
        if words and words <= {"boolean", "null"}:
            options = ["True", "False"] * ("boolean" in words) + ["None"] * ("null" in words)
            rules.append(f"{rule}: {' | '.join(_text(word) for word in options)}")
        else:
            schemas[rule] = (_inner(tool, schema), f"{place}.properties.{name}")
        (required if needed else optional).append(f"{_text(name + '=')} {rule}")
    arguments = ' ", " '.join(required)
    if required:
        arguments += "".join(f' (", " {each})?' for each in optional)
    else:
        chains = [
            each + "".join(f' (", " {later})?' for later in optional[at + 1 :])
            for at, each in enumerate(optional)
        ]
        arguments = f"({' | '.join(chains)})?" if chains else ""
    return f"{_text(tool.name + '(')} {arguments} {_text(')')}"


def _xml_call(
    form: ToolFormat, tool: Tool, number: int, place: str, schemas: Schemas, rules: list[str]
) -> str:
    parts = []
    for index, (name, schema, needed) in enumerate(_properties(tool)):
        rule = f"value{number}_{index}"
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        closing = f"\n{END_PARAMETER}\n"
        if choices and all(isinstance(choice, str) for choice in choices):
            rules.append(f"{rule}: ({' | '.join(map(_text, choices))}) {_text(closing)}")
        elif types_of(schema) == {"string"}:
            rules.append(f"{rule}[suffix={json.dumps(closing)}]: /(?s:.*)/")
        else:
            schemas[f"json{number}_{index}"] = (_inner(tool, schema), f"{place}.properties.{name}")
            rules.append(f"{rule}: json{number}_{index} {_text(closing)}")
        part = f"({_text(f'{PARAMETER}{name}>' + chr(10))} {rule})"
        parts.append(part if needed else f"{part}?")
    return f"{_text(f'{FUNCTION}{tool.name}>' + chr(10))} {' '.join(parts)} {_text(END_FUNCTION)}"


def _properties(tool: Tool) -> list[tuple[str, Any, bool]]:
    """Name, schema and need of each parameter of a tool."""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    needed = set(required) if isinstance(required, list) else set()
    return [(name, schema, name in needed) for name, schema in (properties or {}).items()]


def _inner(tool: Tool, schema: Any) -> Mapping[str, Any]:
    """The schema of one parameter, with the definitions that it may refer to."""
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return {**shared, **schema} if isinstance(schema, Mapping) else {**shared}


def _text(text: str) -> str:
    """A text as Lark's notation writes it; "" for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""
