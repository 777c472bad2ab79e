"""Grammars of answers that may or must call tools, in each dialect.

They are used if a call is required, if a tool is strict, or if the answer is a call or JSON of a schema. A
grammar is written in Lark's notation. The arguments of each tool are a rule, which the engine replaces by the
grammar of the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fovea.core.constraints import AnswerFormat, Tool, ToolUse
from fovea.core.errors import InvalidRequest
from fovea.dialects.calls import END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER, types_of
from fovea.dialects.dialect import Dialect, ToolFormat

ANYTHING: Mapping[str, Any] = {"type": "object"}
WORDS = {True: "True", False: "False", None: "None"}
NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
PYTHON_NAME = re.compile(r"[\w.:/-]+")
UNCHECKED = ("pattern", "minLength", "maxLength", "format")
"""Keywords about strings that cannot be followed where strings end at a tag."""
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
    _check_names(use, dialect.tools)
    if answer is not None and dialect.tools.notation == "json" and dialect.tools.bare:
        raise InvalidRequest(
            f"{answer.param}: this model writes its tool calls without a mark, so they cannot be told from "
            "other JSON; send tools or the form of the answer",
            param=answer.param,
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


def _check_names(use: ToolUse, form: ToolFormat) -> None:
    """Raise InvalidRequest for a name that cannot be written as that of a Python function."""
    if form.notation != "python":
        return
    for tool, number in use.callable:
        wrong = [name for name, _, _ in _properties(tool) if not PYTHON_NAME.fullmatch(name)]
        if not PYTHON_NAME.fullmatch(tool.name) or wrong:
            place = f"tools[{number}].function" + (".parameters" if wrong else ".name")
            raise InvalidRequest(
                f"{place}: this model writes calls like Python, which has no name "
                f"{(wrong[0] if wrong else tool.name)[:64]!r}",
                param=place,
            )


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
    for number, (tool, place) in enumerate(tools):
        rules.append(f"tool{number}: {write(form, tool, number, place, schemas, rules)}")
    rules.append(f"any: {' | '.join(f'tool{number}' for number in range(len(tools)))}")
    first, marked, more = _around(form, several)
    rules += ["BREAK: /\\n/", f"calls: {first} {more}"]
    starts = {"text": "", "token": ""}
    if free and form.begin:
        starts = _free_starts(form, f"{marked} {more}")
    else:
        rules.append("start: calls" + (" | final" if final is not None else ""))
    marks = {name: mark for name, mark in (("begin", form.begin), ("end", form.end)) if mark}
    return AnswerFormat.calls("\n".join(rules) + "\n", schemas, marks, starts)


def _around(form: ToolFormat, several: bool) -> tuple[str, str, str]:
    """Parts of rules: the first call or list of calls, what follows its first mark, and further calls.

    `any` is the rule of a call, `begin` and `end` are those of the marks.
    """
    end = "end" if form.end else ""
    if form.notation == "python":
        calls = '"[" any' + (' ("," " "? any)*' if several else "") + ' "]"'
        return (calls if form.bare else f"begin {calls} {end}"), f"{calls} {end}", ""
    edge = "BREAK?" if form.newline else ""
    marked = f"{edge} any {edge} {end}"
    one = "any" if form.bare else f"begin {marked}"
    return one, marked, f"({_text(form.separator)} {one})*" if several else ""


def _free_starts(form: ToolFormat, marked: str) -> dict[str, str]:
    """The rules of an answer that may begin with text, or have no call.

    Returns two versions. token: the mark is one token of the vocabulary, so text cannot contain it. text:
    the mark is written in letters, so the rule for text excludes it. Where calls need no mark, text must not
    begin like one.

    marked: what follows a mark.
    """
    text = r"[ \t\r\n]*[^ \t\r\n{\[](?s:.*)" if form.bare else "(?s:.+)"
    bare = "calls | " if form.bare else ""
    without = f"/{text}/ & ~/(?s:.*){_literal(form.begin)}(?s:.*)/"
    return {
        "token": f"PROSE: /{text}/\nstart: {bare}PROSE? (begin {marked})?\n",
        "text": (
            f"PROSE: {without}\nbefore[suffix={_text(form.begin)}]: /({text})?/\n"
            f"start: ({bare}PROSE | before {marked})?\n"
        ),
    }


def _literal(text: str) -> str:
    """A text as a regular expression of Lark's notation."""
    return re.escape(text).replace("/", r"\/")


def _json_call(
    form: ToolFormat, tool: Tool, number: int, place: str, schemas: Schemas, rules: list[str]
) -> str:
    schemas[f"arguments{number}"] = ({"type": "object", **(tool.parameters or NOTHING)}, place)
    head = f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": '
    return f"{_text(head)} arguments{number} {_text('}')}"


def _python_call(
    form: ToolFormat, tool: Tool, number: int, place: str, schemas: Schemas, rules: list[str]
) -> str:
    """A call with its required arguments first, in the schema's order, and then any of the others."""
    if tool.parameters == ANYTHING:
        rules.append(f"value{number}: json{number} | {' | '.join(map(_text, WORDS.values()))}")
        rules.append(f'pair{number}: /[A-Za-z_][A-Za-z0-9_]*/ "=" value{number}')
        schemas[f"json{number}"] = ({}, place)
        return f'{_text(tool.name + "(")} (pair{number} (", " pair{number})*)? {_text(")")}'
    required: list[str] = []
    optional: list[str] = []
    for index, (name, schema, needed) in enumerate(_properties(tool)):
        rule = f"value{number}_{index}"
        words = _words(schema)
        if words:
            rules.append(f"{rule}: {' | '.join(map(_text, words))}")
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


def _words(schema: Any) -> list[str]:
    """Python's words for the values of a schema that has only true, false and null; []: it has others."""
    if not types_of(schema) or not types_of(schema) <= {"boolean", "null"}:
        return []
    allowed: list[Any] = [*([True, False] if "boolean" in types_of(schema) else [])]
    allowed += [None] if "null" in types_of(schema) else []
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if values is not None:
            allowed = [value for value in allowed if any(value is other for other in values)]
    return [WORDS[value] for value in allowed]


def _xml_call(
    form: ToolFormat, tool: Tool, number: int, place: str, schemas: Schemas, rules: list[str]
) -> str:
    opening, closing = _text(f"{FUNCTION}{tool.name}>\n"), f"\n{END_PARAMETER}\n"
    if tool.parameters == ANYTHING:
        rules.append(f"value{number}[suffix={json.dumps(closing)}]: /(?s:.*)/")
        rules.append(f'pair{number}: {_text(PARAMETER)} /[^<>\\n]+/ ">\\n" value{number}')
        return f"{opening} pair{number}* {_text(END_FUNCTION)}"
    parts = []
    for index, (name, schema, needed) in enumerate(_properties(tool)):
        rule, where = f"value{number}_{index}", f"{place}.properties.{name}"
        choices = _choices(schema)
        if choices:
            rules.append(f"{rule}: ({' | '.join(map(_text, choices))}) {_text(closing)}")
        elif "string" in types_of(schema) and types_of(schema) <= {"string", "null"}:
            _check_string(schema, where)
            rules.append(f"{rule}[suffix={json.dumps(closing)}]: /(?s:.*)/")
        else:
            schemas[f"json{number}_{index}"] = (_inner(tool, schema), where)
            rules.append(f"{rule}: json{number}_{index} {_text(closing)}")
        part = f"({_text(f'{PARAMETER}{name}>' + chr(10))} {rule})"
        parts.append(part if needed else f"{part}?")
    return f"{opening} {' '.join(parts)} {_text(END_FUNCTION)}"


def _choices(schema: Any) -> list[str]:
    """The texts that a schema allows if it names all of them; []: it does not."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum") or []
    return list(values) if all(isinstance(value, str) for value in values) else []


def _check_string(schema: Mapping[str, Any], place: str) -> None:
    """Raise InvalidRequest for a keyword about a string that cannot be followed."""
    parts = [schema, *(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]
    wrong = [name for part in parts if isinstance(part, Mapping) for name in UNCHECKED if name in part]
    if wrong:
        raise InvalidRequest(
            f"{place}: {wrong[0]} of a string cannot be followed in the way in which this model writes calls",
            param="tools",
            code="unsupported_format",
        )


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
    """A text as Lark's notation writes it; "" for none. It does not take U+007F as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
