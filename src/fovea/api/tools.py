"""Wire models of tools: their definitions, the calls that a message holds, and which calls are allowed.

Docstrings and descriptions of this module are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from fovea.api.wire import Flag, FreeJson, Text, Wire, Word
from fovea.core.errors import InvalidRequest
from fovea.core.tools import Tool, ToolCall, ToolUse

MAX_TOOLS = 128
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]
PARAMETERS = "JSON Schema of the arguments: an object. Default: no arguments."


class FunctionBody(Wire):
    """A function that the model may call."""

    name: Name = Field(description="Letters, digits and _ . : / - in any order, at most 128.")
    description: Text | None = Field(
        default=None, description="What it does. Most chat templates show it to the model."
    )
    parameters: FreeJson | None = Field(default=None, description=PARAMETERS)
    strict: Flag | None = Field(
        default=None,
        description="Whether the arguments always follow the schema. Calls that tool_choice requires always "
        "do.",
    )


class ToolBody(Wire):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionBody


class NamedFunction(Wire):
    """The name of a function."""

    name: Name


class NamedTool(Wire):
    """The tool that has to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class CalledFunction(Wire):
    """A function that was called, and its arguments."""

    name: Name
    arguments: Text | None = Field(default=None, description="JSON text of an object, as the model wrote it.")


class ToolCallBody(Wire):
    """A call that an earlier answer made."""

    id: Word | None = Field(
        default=None, description="Id of the call. The message with its result repeats it."
    )
    type: Literal["function"] | None = "function"
    index: int | None = None
    function: CalledFunction


class ToolFields(Wire):
    """The fields of a request that offer tools and set which calls are allowed."""

    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="The tools that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        default=None,
        description="auto: the model decides. none: no calls. required: the answer is one call or several. A "
        "named tool: the answer is a call of this tool. Default: auto if there are tools.",
    )
    parallel_tool_calls: Flag | None = Field(
        default=None,
        description="false: at most one call, if a call is required, a tool is strict, or response_format is "
        "set; otherwise the model may still write several. Default: true.",
    )


def tool_use(body: ToolFields) -> ToolUse:
    """The tools of a request. Raises InvalidRequest if its fields contradict each other."""
    tools = tuple(_tool(entry, f"tools[{index}]") for index, entry in enumerate(body.tools or ()))
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(
            f"tools: two tools have the name {twice!r}", param=f"tools[{names.index(twice)}].function.name"
        )
    several = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools; there are none", param="tool_choice")
        return ToolUse()
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        if wanted not in names:
            raise InvalidRequest(
                f"tool_choice names {wanted!r}; there are {', '.join(map(repr, names[:16]))}",
                param="tool_choice.function.name",
            )
        return ToolUse(tools, "required", several=False, only=wanted)
    return ToolUse(tools, choice or "auto", several)


def _tool(body: ToolBody, param: str) -> Tool:
    parameters = body.function.parameters or {}
    kind = parameters.get("type", "object")
    if kind != "object":
        raise InvalidRequest(
            f"{param}.function.parameters: the type of the arguments is 'object', not {str(kind)[:50]!r}",
            param=f"{param}.function.parameters",
        )
    definition = body.model_dump(exclude_none=True)
    definition["function"].pop("strict", None)
    definition["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return Tool(body.function.name, parameters, definition, bool(body.function.strict))


def tool_calls(calls: Sequence[ToolCallBody] | None) -> tuple[ToolCall, ...]:
    """The calls that a message holds."""
    return tuple(
        ToolCall(call.function.name, call.function.arguments or "", call.id or "") for call in calls or ()
    )
