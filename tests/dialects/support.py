"""Tools, and calls of them as each format writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fovea.core.constraints import Tool
from fovea.dialects.dialect import FORMATS, ToolFormat
from fovea.dialects.reader import Piece

Arguments = Mapping[str, Any]


class Call(NamedTuple):
    """A call of a tool. values: its arguments."""

    name: str
    values: Arguments


class Parts(NamedTuple):
    """An answer after it was read. calls: name and JSON text of the arguments of each."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]

    @property
    def values(self) -> list[Call]:
        return [Call(name, json.loads(text)) for name, text in self.calls]


def join(pieces: Iterable[Piece]) -> Parts:
    """Join the pieces of an answer. Fails if pieces of arguments come before their call."""
    content = reasoning = ""
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "content":
            content += piece.text
        elif piece.kind == "reasoning":
            reasoning += piece.text
        elif piece.kind == "call":
            assert piece.index == len(calls)
            calls.append([piece.text, ""])
        else:
            assert piece.index == len(calls) - 1
            calls[piece.index][1] += piece.text
    return Parts(content, reasoning, tuple((name, text) for name, text in calls))


def tool(name: str, *, strict: bool = False, required: tuple[str, ...] = (), **properties: Any) -> Tool:
    """Return a tool. properties: schemas of its parameters by their names."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return Tool(name, schema, {"type": "function", "function": {"name": name, "parameters": schema}}, strict)


WEATHER = tool(
    "get_weather",
    required=("city",),
    city={"type": "string"},
    days={"type": "integer"},
    exact={"type": "boolean"},
    where={"type": "object"},
)
STOP = tool("stop")
TOOLS = (WEATHER, STOP)
SCHEMAS = {each.name: each.parameters for each in TOOLS}


def write(form: ToolFormat | str, *calls: Call) -> str:
    """Return calls as the chat template of a format writes them."""
    form = FORMATS[form] if isinstance(form, str) else form
    if form.notation == "python":
        return f"{form.begin}[{', '.join(_python(call) for call in calls)}]{form.end}"
    texts = [_xml(call) if form.notation == "xml" else _json(form, call) for call in calls]
    if form.bare:
        return form.separator.join(texts)
    edge = "\n" if form.newline else ""
    return form.separator.join(f"{form.begin}{edge}{text}{edge}{form.end}" for text in texts)


def _json(form: ToolFormat, call: Call) -> str:
    return json.dumps({"name": call.name, form.arguments: call.values}, ensure_ascii=False)


def _python(call: Call) -> str:
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.values.items())})"


def _xml(call: Call) -> str:
    values = "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for name, value in call.values.items()
    )
    return f"<function={call.name}>\n{values}</function>"
