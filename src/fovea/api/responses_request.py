"""Requests to OpenAI's /v1/responses: their wire models, and how they become chat requests.

Docstrings and descriptions of the models are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from fovea.api.answer_format import SCHEMA, Schema
from fovea.api.content import MAX_TOOLS, NO_EFFECT, PARAMETERS, SENT_BACK, ChatMessage, Detail, Name
from fovea.api.schema import ChatRequest
from fovea.api.wire import (
    EXTENSION,
    MAX_COUNT,
    MAX_ITEMS,
    SAME,
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
from fovea.core.errors import FoveaError, InvalidRequest, RequestError


class InputText(Wire):
    """A part of an item that is text: of the user, or of an earlier answer."""

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: Text = ""
    refusal: Text | None = option("Text of a refusal.")
    annotations: list[Any] | None = option(SENT_BACK)
    logprobs: list[Any] | None = option(SENT_BACK)


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
    id: Word | None = option(NO_EFFECT)
    status: Word | None = option(NO_EFFECT)
    phase: Word | None = option(NO_EFFECT)


class FunctionCallItem(Wire):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: Word = Field(description="Id of the call. The item with its result repeats it.")
    name: Name
    arguments: Text = Field(description="JSON text of an object.")
    id: Word | None = option(NO_EFFECT)
    status: Word | None = option(NO_EFFECT)


class FunctionOutputItem(Wire):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Word = Field(description="The call whose result this is.")
    output: Contents
    id: Word | None = option(NO_EFFECT)
    status: Word | None = option(NO_EFFECT)


class ReasoningItem(Wire):
    """The reasoning before an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[list[InputText], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    summary: list[Any] | None = option(NO_EFFECT)
    encrypted_content: Text | None = option(NO_EFFECT)
    id: Word | None = option(NO_EFFECT)
    status: Word | None = option(NO_EFFECT)


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
    parameters: FreeJson | None = option(PARAMETERS)
    strict: Flag | None = option("Whether the arguments always follow the schema. Default: false.")


class NamedTool(Wire):
    """The tool that has to be called."""

    type: Literal["function"]
    name: Name


class TextFormat(Wire):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Word | None = option(NO_EFFECT)
    description: Text | None = option(NO_EFFECT)
    schema_: Schema | None = option(SCHEMA, alias="schema")
    strict: Flag | None = option("Accepted, without effect: an answer always follows the schema.")


class TextOptions(Wire):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Word | None = option(NO_EFFECT)


class ReasoningOptions(Wire):
    """Options of the model's reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = option(
        "As `reasoning_effort` in chat completions."
    )
    summary: Word | None = option(NO_EFFECT)
    generate_summary: Word | None = option(NO_EFFECT)


def _as_list(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(Body, SharedFields):
    """A request for an answer to items: messages, tool calls and their results."""

    input: Annotated[
        list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), BeforeValidator(_as_list)
    ] = Field(description="Text of the user, or a list of items.")
    instructions: Text | None = option("Message of the system. It is not kept for later requests.")
    previous_response_id: Word | None = option(
        "An answer of this server that is continued: its items come before those of `input`."
    )
    store: Flag | None = option(
        "Whether the answer is kept, so that later requests can continue it. Default: true. It "
        "is kept in memory, until newer ones need the room or the server ends."
    )
    max_output_tokens: Integer | None = option(
        "Longest answer in tokens, reasoning included.", ge=1, le=MAX_COUNT
    )
    top_logprobs: Integer | None = option(
        "Number of most likely tokens to report for each position.", ge=0, le=20
    )
    include: list[Word] | None = option(
        "message.output_text.logprobs: report the log probability of each token. Others have no effect.",
        max_length=16,
    )
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = option(
        "The tools that the model may call. Tools that OpenAI runs are refused."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = option(SAME)
    parallel_tool_calls: Flag | None = option(SAME)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: dict[Word, Any] | None = option(NO_EFFECT)
    chat_template_kwargs: dict[Word, Any] | None = option(EXTENSION)
    seed: Integer | None = option(EXTENSION, ge=-(2**63), lt=2**63)
    truncation: Literal["auto", "disabled"] | None = option(
        "Accepted, without effect: a prompt that is too long is refused."
    )
    background: Literal[False] | None = option("Only false is accepted.")
    max_tool_calls: Integer | None = option(NO_EFFECT)
    metadata: dict[Word, Word] | None = option("Returned with the answer.", max_length=64)
    user: Word | None = option(NO_EFFECT)
    service_tier: Word | None = option(NO_EFFECT)
    safety_identifier: Word | None = option(NO_EFFECT)
    prompt_cache_key: Word | None = option(NO_EFFECT)
    prompt_cache_retention: Word | None = option(NO_EFFECT)
    prompt_cache_options: dict[Word, Any] | None = option(NO_EFFECT)
    context_management: Any = option(NO_EFFECT)


COPIED = ("top_logprobs", "parallel_tool_calls", "chat_template_kwargs", "seed")
"""Fields that are copied into the chat request as they are, beside the shared ones."""
LOGPROBS = "message.output_text.logprobs"
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function.name": "tool_choice.name",
}
"""Fields of chat requests, and their names in this API."""
_MESSAGE = re.compile(r"messages\[(\d+)\]")
_TOOL = re.compile(r"(tools\[\d+\])\.function(\.parameters)?")


class Conversation:
    """The messages of a request, and the item of `input` from which each was made.

    messages: dictionaries that ChatMessage accepts, or ChatMessages.
    places: JSON path of the item of each message in the request.
    """

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.places: list[str] = []

    def add(self, place: str, **message: Any) -> None:
        self.messages.append(message)
        self.places.append(place)

    def add_to_last(self, place: str, name: str, value: Any) -> None:
        """Add to the assistant's message that is being written, or begin one.

        A model's answer has reasoning, text and calls in one message; here each is an item.
        """
        last = self.messages[-1] if self.messages else None
        if not isinstance(last, dict) or last["role"] != "assistant" or name in last.keys() - {"tool_calls"}:
            self.add(place, role="assistant")
            last = self.messages[-1]
        if name == "tool_calls":
            last.setdefault("tool_calls", []).append(value)
        else:
            last[name] = value


def chat_request(body: ResponsesRequest, earlier: Sequence[ChatMessage]) -> tuple[ChatRequest, Conversation]:
    """Convert a request to a chat request. Returns it, and its conversation without `instructions`.

    earlier: messages of the answer that it continues. Raises the errors of `chat_fields`.
    """
    fields, conversation = chat_fields(body, earlier)
    return ChatRequest.model_validate(fields), conversation


def chat_fields(
    body: ResponsesRequest, earlier: Sequence[ChatMessage] = ()
) -> tuple[dict[str, Any], Conversation]:
    """Convert a request to the fields of a chat request.

    Returns them, and its conversation without `instructions`.

    earlier: messages of the answer that it continues. Raises InvalidRequest if there is no message.
    """
    conversation = Conversation()
    for message in earlier:
        conversation.messages.append(message)
        conversation.places.append("previous_response_id")
    for index, item in enumerate(body.input):
        _add_item(conversation, item, f"input[{index}]")
    if not conversation.messages:
        raise InvalidRequest("input has no message, call or result", param="input")
    fields = shared_values(body, *COPIED)
    fields["messages"] = list(conversation.messages)
    if body.instructions is not None:
        fields["messages"].insert(0, {"role": "system", "content": body.instructions})
    fields |= _options(body)
    return fields, conversation


def _options(body: ResponsesRequest) -> dict[str, Any]:
    """The fields of a chat request that have other names or forms here."""
    fields: dict[str, Any] = {}
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        fields["logprobs"] = True
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    choice = body.tool_choice
    if choice is not None:
        fields["tool_choice"] = (
            {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, NamedTool)
            else choice
        )
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body.text.format)
    return fields


@contextmanager
def responses_names(places: Sequence[str], instructions: bool) -> Iterator[None]:
    """Rename fields in errors of the block from those of chat requests to those of the client.

    places: of the messages. instructions: whether the first message is `instructions` instead.
    """
    paths = ["instructions", *places] if instructions else list(places)
    with renamed(NAMES, paths, "image_url"):
        yield


@contextmanager
def renamed(
    names: Mapping[str, str], paths: Sequence[str], image: str, parameters: str = "parameters"
) -> Iterator[None]:
    """Rename fields in errors of the block, like `rename`."""
    try:
        yield
    except RequestError as error:
        rename(error, names, paths, image, parameters)
        raise


def rename(
    error: FoveaError,
    names: Mapping[str, str],
    paths: Sequence[str],
    image: str,
    parameters: str = "parameters",
) -> None:
    """Rename fields in an error from those of chat requests to those of another API.

    names: fields by other names. paths: JSON path of each message in the client's request. image: name of the
    field of an image's URL. parameters: name of the field of a tool's schema.
    """

    def tool(match: re.Match[str]) -> str:
        return match[1] + (f".{parameters}" if match[2] else "")

    def path(match: re.Match[str]) -> str:
        number = int(match[1])
        return paths[number] if number < len(paths) else match[0]

    old = error.param
    if old is None:
        return
    new = names.get(old) or _TOOL.sub(tool, _MESSAGE.sub(path, old))
    new = new.replace("image_url.url", image)
    message = error.message.replace(old, new, 1) if old in error.message else error.message
    for theirs in sorted(names, key=len, reverse=True):
        if "." in theirs:
            message = message.replace(theirs, names[theirs])
    error.message = _TOOL.sub(tool, message)
    error.param = new


def _add_item(conversation: Conversation, item: Item, place: str) -> None:
    if isinstance(item, MessageItem):
        content = _content(item.content)
        if item.role == "assistant":
            conversation.add_to_last(place, "content", content)
        else:
            conversation.add(place, role=item.role, content=content)
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        conversation.add_to_last(place, "tool_calls", call)
    elif isinstance(item, FunctionOutputItem):
        conversation.add(place, role="tool", content=_content(item.output), tool_call_id=item.call_id)
    else:
        text = "".join(part.text for part in item.content or ())
        if text:
            conversation.add_to_last(place, "reasoning_content", text)


def _content(content: str | list[InputText | InputImage]) -> Any:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, InputText):
            parts.append({"type": "text", "text": part.refusal or part.text})
            continue
        parts.append({"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}})
    return parts


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    schema = {"name": form.name or "answer", "schema": form.schema_}
    return {"type": "json_schema", "json_schema": schema}
