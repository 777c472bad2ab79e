"""Wire models of requests to /v1/responses.

Docstrings and descriptions of this module are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from fovea.api.answer_format import SCHEMA, Schema
from fovea.api.content import NO_EFFECT, SENT_BACK, Detail
from fovea.api.shared import EXTENSION, SAME, SharedFields
from fovea.api.tools import MAX_TOOLS, PARAMETERS, Name
from fovea.api.wire import MAX_COUNT, MAX_ITEMS, Body, Flag, FreeJson, Integer, Text, Url, Wire, Word


class InputText(Wire):
    """A part of an item that is text: of the user, or of an earlier answer."""

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: Text = ""
    refusal: Text | None = Field(default=None, description="Text of a refusal.")
    annotations: list[Any] | None = Field(default=None, description=SENT_BACK)
    logprobs: list[Any] | None = Field(default=None, description=SENT_BACK)


class InputImage(Wire):
    """A part of an item that is an image."""

    type: Literal["input_image"]
    image_url: Url = Field(description="A data:, https: or http: URL, or fovea-image://ID.")
    detail: Detail = Field(default="auto", description="As in chat completions.")


Content = Annotated[InputText | InputImage, Field(discriminator="type")]
Contents = Text | Annotated[list[Content], Field(max_length=MAX_ITEMS, fail_fast=True)]


class MessageItem(Wire):
    """A message of the user, of the system, or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Contents
    id: Word | None = Field(default=None, description=NO_EFFECT)
    status: Word | None = Field(default=None, description=NO_EFFECT)
    phase: Word | None = Field(default=None, description=NO_EFFECT)


class FunctionCallItem(Wire):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: Word = Field(description="Id of the call. The item with its result repeats it.")
    name: Name
    arguments: Text = Field(description="JSON text of an object.")
    id: Word | None = Field(default=None, description=NO_EFFECT)
    status: Word | None = Field(default=None, description=NO_EFFECT)


class FunctionOutputItem(Wire):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Word = Field(description="The call whose result this is.")
    output: Contents
    id: Word | None = Field(default=None, description=NO_EFFECT)
    status: Word | None = Field(default=None, description=NO_EFFECT)


class ReasoningItem(Wire):
    """The reasoning before an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[list[InputText], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    summary: list[Any] | None = Field(default=None, description=NO_EFFECT)
    encrypted_content: Text | None = Field(default=None, description=NO_EFFECT)
    id: Word | None = Field(default=None, description=NO_EFFECT)
    status: Word | None = Field(default=None, description=NO_EFFECT)


def _kind(value: Any) -> str:
    """The kind of an item: its type, or that of a message, whose type may be left out."""
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return str(kind)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Wire):
    """A tool that the model may call."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: FreeJson | None = Field(default=None, description=PARAMETERS)
    strict: Flag | None = Field(
        default=None, description="Whether the arguments always follow the schema. Default: false."
    )


class NamedTool(Wire):
    """The tool that has to be called."""

    type: Literal["function"]
    name: Name


class TextFormat(Wire):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Word | None = Field(default=None, description=NO_EFFECT)
    description: Text | None = Field(default=None, description=NO_EFFECT)
    schema_: Schema | None = Field(default=None, alias="schema", description=SCHEMA)
    strict: Flag | None = Field(
        default=None, description="Accepted, without effect: an answer always follows the schema."
    )


class TextOptions(Wire):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Word | None = Field(default=None, description=NO_EFFECT)


class ReasoningOptions(Wire):
    """Options of the model's reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="As `reasoning_effort` in chat completions."
    )
    summary: Word | None = Field(default=None, description=NO_EFFECT)
    generate_summary: Word | None = Field(default=None, description=NO_EFFECT)


def _as_list(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(Body, SharedFields):
    """A request for an answer to items: messages, tool calls and their results."""

    input: Annotated[
        list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), BeforeValidator(_as_list)
    ] = Field(description="Text of the user, or a list of items.")
    instructions: Text | None = Field(
        default=None, description="Message of the system. It is not kept for later requests."
    )
    previous_response_id: Word | None = Field(
        default=None,
        description="An answer of this server that is continued: its items come before those of `input`.",
    )
    store: Flag | None = Field(
        default=None,
        description="Whether the answer is kept, so that later requests can continue it. Default: true. It "
        "is kept in memory, until newer ones need the room or the server ends.",
    )
    max_output_tokens: Integer | None = Field(
        default=None, ge=1, le=MAX_COUNT, description="Longest answer in tokens, reasoning included."
    )
    top_logprobs: Integer | None = Field(
        default=None, ge=0, le=20, description="Number of most likely tokens to report for each position."
    )
    include: list[Word] | None = Field(
        default=None,
        max_length=16,
        description="message.output_text.logprobs: report the log probability of each token. Others have no "
        "effect.",
    )
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="The tools that the model may call. Tools that OpenAI runs are refused."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        default=None, description=SAME
    )
    parallel_tool_calls: Flag | None = Field(default=None, description=SAME)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: dict[Word, Any] | None = Field(default=None, description=NO_EFFECT)
    chat_template_kwargs: dict[Word, Any] | None = Field(default=None, description=EXTENSION)
    seed: Integer | None = Field(default=None, ge=-(2**63), lt=2**63, description=EXTENSION)
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="Accepted, without effect: a prompt that is too long is refused."
    )
    background: Literal[False] | None = Field(default=None, description="Only false is accepted.")
    max_tool_calls: Integer | None = Field(default=None, description=NO_EFFECT)
    metadata: dict[Word, Word] | None = Field(
        default=None, max_length=64, description="Returned with the answer."
    )
    user: Word | None = Field(default=None, description=NO_EFFECT)
    service_tier: Word | None = Field(default=None, description=NO_EFFECT)
    safety_identifier: Word | None = Field(default=None, description=NO_EFFECT)
    prompt_cache_key: Word | None = Field(default=None, description=NO_EFFECT)
    prompt_cache_retention: Word | None = Field(default=None, description=NO_EFFECT)
    prompt_cache_options: dict[Word, Any] | None = Field(default=None, description=NO_EFFECT)
    context_management: Any = Field(default=None, description=NO_EFFECT)
