"""Wire models of requests to /v1/messages.

Docstrings and descriptions of this module are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from fovea.api.content import NO_EFFECT, SENT_BACK
from fovea.api.shared import SharedFields
from fovea.api.tools import MAX_TOOLS, Name
from fovea.api.wire import MAX_COUNT, MAX_ITEMS, Base64, Body, Flag, FreeJson, Integer, Text, Url, Wire, Word
from fovea.core.sampling import MAX_STOP_STRINGS

IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def image_type(declared: str) -> str:
    """Return the media type for the data: URL of an image. Any name is accepted: its own bytes decide.

    declared: media_type of the request, such as image/jpg, image/heic or "".
    """
    kind = declared.strip().lower().replace("image/jpg", "image/jpeg")
    return kind if kind in IMAGES else "image/any"


class Base64Source(Wire):
    """An image as base64. Bodies that were cut have it as a Payload, which is a data: URL."""

    type: Literal["base64"]
    media_type: Word = Field(description=f"{', '.join(IMAGES)}, or any other. The image's own bytes decide.")
    data: Base64 = Field(description="The image's bytes as base64.")


class UrlSource(Wire):
    """An image by its URL."""

    type: Literal["url"]
    url: Url = Field(description="As `image_url` in chat completions.")


class Block(Wire):
    """Fields that every block may have."""

    cache_control: dict[Word, Any] | None = Field(
        default=None, description="Accepted, without effect: prefixes of prompts are always cached."
    )


class TextBlock(Block):
    """A block of text."""

    type: Literal["text"]
    text: Text
    citations: list[Any] | None = Field(default=None, description=NO_EFFECT)


class ImageBlock(Block):
    """A block that is an image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class ThinkingBlock(Block):
    """The reasoning before an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = Field(default=None, description=NO_EFFECT)


class ToolUseBlock(Block):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: Word = Field(description="Id of the call. The block with its result repeats it.")
    name: Name
    input: FreeJson = Field(description="The arguments.")


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Word = Field(description="The call whose result this is.")
    content: (
        Text
        | Annotated[
            list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
            Field(max_length=MAX_ITEMS, fail_fast=True),
        ]
        | None
    ) = None
    is_error: Flag | None = Field(default=None, description=NO_EFFECT)


AnyBlock = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class MessageBody(Wire):
    """One message of a conversation. An answer may be sent back as a whole, also one that is a refusal."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[AnyBlock], Field(max_length=MAX_ITEMS, fail_fast=True)] = Field(
        description="Text or blocks. Only a message of the assistant may have none: a refusal."
    )
    id: Word | None = Field(default=None, description=SENT_BACK)
    type: Literal["message"] | None = Field(default=None, description=SENT_BACK)
    model: Word | None = Field(default=None, description=SENT_BACK)
    stop_reason: Word | None = Field(default=None, description=SENT_BACK)
    stop_sequence: Word | None = Field(default=None, description=SENT_BACK)
    stop_details: dict[Word, Any] | None = Field(default=None, description=SENT_BACK)
    usage: dict[Word, Any] | None = Field(default=None, description=SENT_BACK)
    container: Any = Field(default=None, description=SENT_BACK)


class ToolDefinition(Wire):
    """A tool that the model may call."""

    name: Name
    input_schema: FreeJson = Field(description="JSON Schema of the arguments, an object.")
    description: Text | None = None
    type: Literal["custom"] | None = Field(
        default=None, description="Tools that Anthropic defines are refused."
    )
    strict: Flag | None = Field(
        default=None, description="Whether the arguments always follow the schema. Default: false."
    )
    cache_control: dict[Word, Any] | None = Field(default=None, description=NO_EFFECT)


class ToolChoice(Wire):
    """Which calls are allowed."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = Field(default=None, description="Required for the type tool.")
    disable_parallel_tool_use: Flag | None = Field(
        default=None, description="As `parallel_tool_calls: false` in chat completions."
    )


class Thinking(Wire):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = Field(default=None, description=NO_EFFECT)
    display: Word | None = Field(default=None, description=NO_EFFECT)


class OutputFormat(Wire):
    """The form of the answer: JSON that is valid against a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Wire):
    """Options of the answer."""

    format: OutputFormat | None = None
    effort: Word | None = Field(default=None, description=NO_EFFECT)


class CountRequest(Body):
    """A request for the number of tokens of a prompt."""

    model: Word | None = Field(default=None, description="Name of the served model. May be omitted.")
    messages: Annotated[list[MessageBody], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_ITEMS)
    system: Text | Annotated[list[TextBlock], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = Field(
        default=None, description="Message of the system."
    )
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="The tools that the model may call."
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest, SharedFields):
    """A request for an answer to a conversation, in Anthropic's form."""

    max_tokens: Integer = Field(
        ge=1, le=MAX_COUNT, description="Longest answer in tokens, reasoning included."
    )
    stop_sequences: Annotated[list[Word], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = Field(
        default=None, description="Texts that end the answer. The answer does not include them."
    )
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        default=None, description="Older name of `output_config.format`."
    )
    metadata: dict[Word, Any] | None = Field(default=None, max_length=64, description=NO_EFFECT)
    service_tier: Word | None = Field(default=None, description=NO_EFFECT)
    container: Any = Field(default=None, description=NO_EFFECT)
    context_management: Any = Field(default=None, description=NO_EFFECT)
