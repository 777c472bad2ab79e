"""Wire models of a conversation: messages with their text, images and videos, tools and their calls.

Docstrings and descriptions of this module are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from fovea.api.wire import (
    MAX_COUNT,
    MAX_ITEMS,
    Flag,
    FreeJson,
    Integer,
    Number,
    Text,
    Url,
    Wire,
    Word,
    option,
)
from fovea.core.constraints import Tool, ToolCall, ToolUse
from fovea.core.errors import InvalidRequest
from fovea.core.media import Payload

MAX_TOOLS = 128
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]
PARAMETERS = "JSON Schema of the arguments: an object. Default: no arguments."


class FunctionBody(Wire):
    """A function that the model may call."""

    name: Name = Field(description="Letters, digits and _ . : / - in any order, at most 128.")
    description: Text | None = option("What it does. Most chat templates show it to the model.")
    parameters: FreeJson | None = option(PARAMETERS)
    strict: Flag | None = option(
        "Whether the arguments always follow the schema. Calls that tool_choice requires always do."
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
    arguments: Text | None = option("JSON text of an object, as the model wrote it.")


class ToolCallBody(Wire):
    """A call that an earlier answer made."""

    id: Word | None = option("Id of the call. The message with its result repeats it.")
    type: Literal["function"] | None = "function"
    index: int | None = None
    function: CalledFunction


class ToolFields(Wire):
    """The fields of a request that offer tools and set which calls are allowed."""

    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = option(
        "The tools that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = option(
        "auto: the model decides. none: no calls. required: the answer is one call or several. A "
        "named tool: the answer is a call of this tool. Default: auto if there are tools."
    )
    parallel_tool_calls: Flag | None = option(
        "false: at most one call, if a call is required, a tool is strict, or response_format is "
        "set; otherwise the model may still write several. Default: true."
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


def _level(value: Any) -> Any:
    """Replace null (no choice) and OpenAI's newer "original" (the image's full size) by a detail level."""
    if value is None:
        return "auto"
    return "high" if value == "original" else value


Detail = Annotated[
    Literal["auto", "low", "medium", "high"],
    BeforeValidator(_level),
    WithJsonSchema({"enum": ["auto", "low", "medium", "high", "original", None]}),
]
NO_EFFECT = "Accepted, without effect."
SENT_BACK = (
    "Accepted, without effect. Answers of some servers contain this field, and clients send answers back."
)
REASONING = "Extension. What the assistant thought. Chat templates decide which of it the model reads again."
URL = "A data:, https:, http: or file: URL, as far as the server's settings allow it"
DETAIL = (
    "Number of visual tokens of the image. low: about 64; medium (extension): about 256; high, and original: "
    "the model's own limit; auto, and null: the server chooses."
)
MAX_PIXELS = "Extension. Upper bound on the pixels of the image after resizing. Overrides `detail`."
MIN_PIXELS = "Extension. Lower bound on the pixels of the image after resizing. Overrides `detail`."


def _as_object(value: Any) -> Any:
    """Some clients send the URL in place of the object."""
    return {"url": value} if isinstance(value, str | Payload) else value


class ImageURL(Wire):
    """An image of a message, and its resolution."""

    url: Url = Field(description=f"{URL}, or fovea-image://ID for an image that was sent to /v1/images.")
    detail: Detail = Field(default="auto", description=DETAIL)
    max_pixels: Integer | None = option(MAX_PIXELS, ge=1, le=MAX_COUNT)
    min_pixels: Integer | None = option(MIN_PIXELS, ge=1, le=MAX_COUNT)


class VideoURL(Wire):
    """A video of a message (extension), and how it is sampled.

    By default, the model's own video settings apply.
    """

    url: Url = Field(description=f"{URL}.")
    fps: Number | None = option("Extension. Frames sampled per second of video.", gt=0, le=240)
    min_frames: Integer | None = option("Extension. Least number of sampled frames.", ge=1, le=4096)
    max_frames: Integer | None = option("Extension. Largest number of sampled frames.", ge=1, le=4096)
    max_pixels: Integer | None = option(
        "Extension. Upper bound on the pixels of one frame after resizing.", ge=1, le=MAX_COUNT
    )
    video_pruning_rate: Number | None = option(
        "Extension. Share of the video's visual tokens that are left out where little moves. "
        "Default: the request's `video_pruning_rate`.",
        ge=0,
        le=0.95,
    )


class Part(Wire):
    """Fields that every part of a message may have."""

    cache_control: dict[Word, Any] | None = option(NO_EFFECT)
    uuid: Word | None = option(NO_EFFECT)


class TextContent(Part):
    """A part of a message that is text."""

    type: Literal["text"]
    text: Text
    annotations: list[Any] | None = option(NO_EFFECT)


class RefusalContent(Part):
    """A part of a message of the assistant in which it refused to answer. The model reads its text."""

    type: Literal["refusal"]
    refusal: Text


class ImageContent(Part):
    """A part of a message that is an image. Only user messages may contain images."""

    type: Literal["image_url"]
    image_url: Annotated[ImageURL, BeforeValidator(_as_object)] = Field(
        description="An object, or its `url` alone."
    )


class VideoContent(Part):
    """A part of a message that is a video (extension). Only user messages may contain videos."""

    type: Literal["video_url"]
    video_url: VideoURL


# Lists fail at their first wrong entry: an error for each of thousands would take long and tell nothing more.
Content = Annotated[TextContent | ImageContent | VideoContent | RefusalContent, Field(discriminator="type")]


class ChatMessage(Wire):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Author of the message. developer means the same as system. tool: the result of a call."
    )
    content: Text | Annotated[list[Content], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = option(
        "Text, or a list of at least one part. Only a message of the assistant with tool calls, "
        "reasoning or a refusal may have none."
    )
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = option(
        "Calls that the assistant made in this message."
    )
    tool_call_id: Word | None = option("In messages of the role tool: the call whose result this is.")
    name: Word | None = option(NO_EFFECT)
    refusal: Text | None = option(
        "In messages of the assistant: text in which it refused to answer. The model reads it "
        "after `content`."
    )
    reasoning: Text | None = option(REASONING)
    reasoning_content: Text | None = option(REASONING)
    annotations: list[Any] | None = option(SENT_BACK)
    provider_specific_fields: dict[Word, Any] | None = option(SENT_BACK)
