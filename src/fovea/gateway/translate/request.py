"""Turns requests of the other APIs into chat requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fovea.api import messages_request as messages
from fovea.api import responses_request as responses
from fovea.api.explain import explained, fields_of
from fovea.api.messages_answer import MessagesWriter
from fovea.api.messages_request import MessagesRequest, ToolUseBlock
from fovea.api.reading import NewId
from fovea.api.responses_answer import ResponsesWriter, echoed
from fovea.api.responses_request import ResponsesRequest
from fovea.api.unknown import Head, head_of, ignored_fields
from fovea.core.errors import FoveaError, InvalidRequest
from fovea.gateway.inspect.body import prefixed
from fovea.gateway.translate.answers import Api, ChatTranslation

TextOf = Callable[[str], str]
"""Returns the text for which a placeholder stands, and any other text as it is."""
REFUSED: dict[str, dict[str, str]] = {
    "messages": {
        "mcp_servers": "a gateway runs no tools",
    },
    "responses": {
        "previous_response_id": "no answers are kept; send all items in input, with store: false",
        "conversation": "no conversations are kept; send all items in input",
        "prompt": "no prompts are kept; send instructions and input",
    },
}
"""Fields that need what chat completions do not have, and the reason, by API."""
_FIELDS = {"messages": fields_of(MessagesRequest), "responses": fields_of(ResponsesRequest)}


def to_chat(
    api: Api,
    body: Any,
    text_of: TextOf = str,
    *,
    head: Head = head_of,
) -> ChatTranslation:
    """Turn a request into a chat request.

    api: "messages" for /v1/messages, "responses" for /v1/responses.
    body: the request's JSON. It is not changed. Strings may be placeholders of long ones; they are passed on
        as they are.
    text_of: resolves placeholders. It is needed for what is not passed on as it is: arguments of calls,
        which become JSON within JSON, stop strings, and fields that the answer repeats.
    head: returns the beginning of a string, placeholder or not.

    Raises InvalidRequest for a body that is not valid, and for features that need a store or tools of the
    provider; `param` is the field's path.
    """
    for name, reason in REFUSED[api].items():
        if isinstance(body, dict) and body.get(name):
            raise InvalidRequest(
                f"{name} is not supported in front of a backend of chat completions: {reason}",
                param=name,
                code="unsupported_field",
            )
    translation = _messages(body, text_of, head) if api == "messages" else _responses(body, text_of, head)
    limit = translation.body.pop("max_completion_tokens", None)
    if limit is not None:
        translation.body["max_tokens"] = limit  # all engines know this name; some ignore the newer one
    return translation


def _messages(body: Any, text_of: TextOf, head: Head) -> ChatTranslation:
    with explained():
        request = MessagesRequest.model_validate(body, extra="allow")
    ignored = ignored_fields(request, _FIELDS["messages"], strict=False, head=head)
    for message in request.messages:
        for block in message.content if isinstance(message.content, list) else ():
            if isinstance(block, ToolUseBlock):
                block.input = _resolved(block.input, text_of)
    fields, conversation = messages.chat_fields(request, prefixed)
    names = dict(messages.NAMES)
    if request.output_format is not None:
        names["response_format.json_schema.schema"] = "output_format.schema"

    def rename(error: FoveaError) -> None:
        responses.rename(error, names, conversation.places, "source", "input_schema")

    return ChatTranslation(
        "messages",
        _chat_body(fields),
        bool(request.stream),
        tuple(ignored),
        request.model or "",
        tuple(text_of(stop) for stop in request.stop_sequences or ()),
        _messages_writer,
        rename,
    )


def _responses(body: Any, text_of: TextOf, head: Head) -> ChatTranslation:
    with explained():
        request = ResponsesRequest.model_validate(body, extra="allow")
    ignored = ignored_fields(request, _FIELDS["responses"], strict=False, head=head)
    fields, conversation = responses.chat_fields(request)
    places = conversation.places
    if request.instructions is not None:
        places = ["instructions", *places]

    def rename(error: FoveaError) -> None:
        responses.rename(error, responses.NAMES, places, "image_url")

    request.store = False  # nothing is kept, and the answer says so
    echo = _resolved(echoed(request), text_of)
    return ChatTranslation(
        "responses",
        _chat_body(fields),
        bool(request.stream),
        tuple(ignored),
        request.model or "",
        (),
        partial(_responses_writer, echo),
        rename,
    )


def _chat_body(fields: dict[str, Any]) -> dict[str, Any]:
    """Complete the fields of a chat request by what engines need, and the translation."""
    for message in fields["messages"]:
        if "reasoning_content" in message:
            message["reasoning"] = message["reasoning_content"]  # engines read one of the names
    if fields.get("continue_final_message"):
        fields["add_generation_prompt"] = False  # vLLM refuses the request without it
    if fields.get("stream"):
        fields["stream_options"] = {"include_usage": True}
    return fields


def _messages_writer(model: str, created: int, ids: NewId) -> MessagesWriter:
    return MessagesWriter(model, ids)


def _responses_writer(echo: dict[str, Any], model: str, created: int, ids: NewId) -> ResponsesWriter:
    return ResponsesWriter(model, echo, created, ids)


def _resolved(value: Any, text_of: TextOf) -> Any:
    """A copy of a JSON value with the texts for which its placeholders stand."""
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, list):
        return [_resolved(entry, text_of) for entry in value]
    if isinstance(value, dict):
        return {text_of(name): _resolved(entry, text_of) for name, entry in value.items()}
    return value
