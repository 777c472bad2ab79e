"""Turns requests to /v1/responses into chat requests, and errors about these back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fovea.api.content import ChatMessage
from fovea.api.responses.request import (
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    InputImage,
    InputText,
    Item,
    MessageItem,
    NamedTool,
    ResponsesRequest,
    TextFormat,
)
from fovea.api.schema import ChatRequest
from fovea.api.shared import shared_values
from fovea.core.errors import FoveaError, InvalidRequest, RequestError

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
