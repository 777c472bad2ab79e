"""Requests to Anthropic's /v1/messages: their wire models, and how they become chat requests.

Docstrings and descriptions of the models are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field

from fovea.api.content import MAX_TOOLS, NO_EFFECT, SENT_BACK, Name
from fovea.api.responses_request import renamed
from fovea.api.schema import ChatRequest
from fovea.api.wire import (
    MAX_COUNT,
    MAX_ITEMS,
    Base64,
    Body,
    Flag,
    FreeJson,
    Integer,
    SharedFields,
    Text,
    Url,
    Wire,
    Word,
    option,
    shared_values,
)
from fovea.core.errors import InvalidRequest
from fovea.core.media import Payload
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

    cache_control: dict[Word, Any] | None = option(
        "Accepted, without effect: prefixes of prompts are always cached."
    )


class TextBlock(Block):
    """A block of text."""

    type: Literal["text"]
    text: Text
    citations: list[Any] | None = option(NO_EFFECT)


class ImageBlock(Block):
    """A block that is an image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class ThinkingBlock(Block):
    """The reasoning before an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = option(NO_EFFECT)


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
    is_error: Flag | None = option(NO_EFFECT)


AnyBlock = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class MessageBody(Wire):
    """One message of a conversation. An answer may be sent back as a whole, also one that is a refusal."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[AnyBlock], Field(max_length=MAX_ITEMS, fail_fast=True)] = Field(
        description="Text or blocks. Only a message of the assistant may have none: a refusal."
    )
    id: Word | None = option(SENT_BACK)
    type: Literal["message"] | None = option(SENT_BACK)
    model: Word | None = option(SENT_BACK)
    stop_reason: Word | None = option(SENT_BACK)
    stop_sequence: Word | None = option(SENT_BACK)
    stop_details: dict[Word, Any] | None = option(SENT_BACK)
    usage: dict[Word, Any] | None = option(SENT_BACK)
    container: Any = option(SENT_BACK)


class ToolDefinition(Wire):
    """A tool that the model may call."""

    name: Name
    input_schema: FreeJson = Field(description="JSON Schema of the arguments, an object.")
    description: Text | None = None
    type: Literal["custom"] | None = option("Tools that Anthropic defines are refused.")
    strict: Flag | None = option("Whether the arguments always follow the schema. Default: false.")
    cache_control: dict[Word, Any] | None = option(NO_EFFECT)


class ToolChoice(Wire):
    """Which calls are allowed."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = option("Required for the type tool.")
    disable_parallel_tool_use: Flag | None = option("As `parallel_tool_calls: false` in chat completions.")


class Thinking(Wire):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = option(NO_EFFECT)
    display: Word | None = option(NO_EFFECT)


class OutputFormat(Wire):
    """The form of the answer: JSON that is valid against a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Wire):
    """Options of the answer."""

    format: OutputFormat | None = None
    effort: Word | None = option(NO_EFFECT)


class CountRequest(Body):
    """A request for the number of tokens of a prompt."""

    model: Word | None = option("Name of the served model. May be omitted.")
    messages: Annotated[list[MessageBody], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_ITEMS)
    system: Text | Annotated[list[TextBlock], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = option(
        "Message of the system."
    )
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = option(
        "The tools that the model may call."
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest, SharedFields):
    """A request for an answer to a conversation, in Anthropic's form."""

    max_tokens: Integer = Field(
        ge=1, le=MAX_COUNT, description="Longest answer in tokens, reasoning included."
    )
    stop_sequences: Annotated[list[Word], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = option(
        "Texts that end the answer. The answer does not include them."
    )
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = option("Older name of `output_config.format`.")
    metadata: dict[Word, Any] | None = option(NO_EFFECT, max_length=64)
    service_tier: Word | None = option(NO_EFFECT)
    container: Any = option(NO_EFFECT)
    context_management: Any = option(NO_EFFECT)


NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "tool_choice.function.name": "tool_choice.name",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""Fields of chat requests, and their names in this API."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Conversation:
    """The messages of a request as chat messages.

    places: JSON path of the origin of each chat message.
    """

    def __init__(self, url_of: Callable[[Base64Source], Any]) -> None:
        """url_of: returns the URL of an image that was sent as base64."""
        self._url_of = url_of
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []

    def add(self, place: str, **message: Any) -> None:
        self.messages.append(message)
        self.places.append(place)

    def part(self, block: TextBlock | ImageBlock) -> dict[str, Any]:
        """A block as a part of a chat message."""
        if isinstance(block, TextBlock):
            return {"type": "text", "text": block.text}
        source = block.source
        url = self._url_of(source) if isinstance(source, Base64Source) else source.url
        return {"type": "image_url", "image_url": {"url": url}}


def chat_request(body: CountRequest) -> tuple[ChatRequest, Conversation]:
    """Convert a request to a chat request. Returns it, and its conversation.

    Raises the errors of `chat_fields`.
    """
    fields, conversation = chat_fields(body)
    return ChatRequest.model_validate(fields), conversation


def data_url(source: Base64Source) -> Payload:
    """The data: URL of an image, as the server reads it: it looks at the image's own bytes for the type."""
    data = source.data
    return (
        data
        if isinstance(data, Payload)
        else Payload(f"data:{image_type(source.media_type)};base64,{data}".encode())
    )


def chat_fields(
    body: CountRequest, url_of: Callable[[Base64Source], Any] = data_url
) -> tuple[dict[str, Any], Conversation]:
    """Convert a request to the fields of a chat request. Returns them, and its conversation.

    url_of: returns the URL of an image that was sent as base64.

    Raises InvalidRequest for a tool choice without a name, and for results in messages of the assistant.
    """
    conversation = Conversation(url_of)
    if body.system:
        system = body.system
        content = system if isinstance(system, str) else [conversation.part(block) for block in system]
        conversation.add("system", role="system", content=content)
    for index, message in enumerate(body.messages):
        _add(conversation, message, f"messages[{index}]")
    fields: dict[str, Any] = {"messages": conversation.messages}
    last = conversation.messages[-1]
    if last["role"] == "assistant" and last.get("content") and not last.get("tool_calls"):
        fields["continue_final_message"] = True  # as Anthropic's API does
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    if body.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if isinstance(body, MessagesRequest):
        fields |= _options(body)
    return fields, conversation


@contextmanager
def messages_names(places: Sequence[str], *, older: bool = False) -> Iterator[None]:
    """Rename fields in errors of the block from those of chat requests to those of the client.

    older: whether the form of the answer has its older name.
    """
    names = dict(NAMES)
    if older:
        names["response_format.json_schema.schema"] = "output_format.schema"
    with renamed(names, places, "source", "input_schema"):
        yield


def _options(body: MessagesRequest) -> dict[str, Any]:
    fields = shared_values(body)
    fields["max_completion_tokens"] = body.max_tokens
    if body.stop_sequences:
        fields["stop"] = body.stop_sequences
    form = body.output_config.format if body.output_config is not None else None
    form = form or body.output_format
    if form is not None:
        schema = {"name": "answer", "schema": form.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _add(conversation: Conversation, message: MessageBody, place: str) -> None:
    """Add the chat messages of one message: results of tools are messages of their own."""
    if isinstance(message.content, str):
        conversation.add(place, role=message.role, content=message.content)
        return
    if message.role == "assistant":
        _add_answer(conversation, message.content, place)
        return
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock):
            content = block.content or ""
            result = content if isinstance(content, str) else [conversation.part(part) for part in content]
            conversation.add(
                f"{place}.content[{index}]", role="tool", content=result, tool_call_id=block.tool_use_id
            )
        elif isinstance(block, TextBlock | ImageBlock):
            parts.append(conversation.part(block))
        else:
            raise InvalidRequest(
                f"{block.type} blocks are accepted in messages of the assistant, not of {message.role}",
                param=f"{place}.content[{index}]",
            )
    if parts or not message.content:
        conversation.add(place, role=message.role, content=parts)


def _add_answer(conversation: Conversation, blocks: Sequence[Any], place: str) -> None:
    fields: dict[str, Any] = {"role": "assistant", "content": None if blocks else ""}
    texts, calls = [], []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ThinkingBlock):
            fields["reasoning_content"] = block.thinking
        elif isinstance(block, TextBlock):
            texts.append(conversation.part(block))
        else:
            raise InvalidRequest(
                f"{block.type} blocks are accepted in messages of the user, not of the assistant",
                param=f"{place}.content[{index}]",
            )
    if texts:
        fields["content"] = texts
    if calls:
        fields["tool_calls"] = calls
    conversation.add(place, **fields)


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type != "tool":
        return {**fields, "tool_choice": CHOICES[choice.type]}
    if choice.name is None:
        raise InvalidRequest(
            "tool_choice.name is required for the type tool", param="tool_choice.name", code="missing_field"
        )
    return {**fields, "tool_choice": {"type": "function", "function": {"name": choice.name}}}
