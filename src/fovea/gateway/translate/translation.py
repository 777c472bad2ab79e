"""Translation of one request of another API to a chat request, and the way back for its answer.

A stream of chat completion chunks becomes events of the other API as its bytes arrive:

    bytes -> sse.Decoder -> one chunk's JSON -> ChatReader -> pieces -> writer of the API -> events -> bytes

It ends exactly once: with the API's last event when the backend has named a finish reason and has ended its
stream, or with an error event otherwise. The end of an answer is written only at the end of the backend's
stream, because the token counts come last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from fovea.api import messages_request as messages
from fovea.api import responses_request as responses
from fovea.api import sse
from fovea.api.explain import explained, fields_of
from fovea.api.messages_answer import MessagesWriter
from fovea.api.messages_request import MessagesRequest, ToolUseBlock
from fovea.api.reading import Answer, NewId, new_id
from fovea.api.responses_answer import ResponsesWriter, echoed
from fovea.api.responses_request import ResponsesRequest
from fovea.api.unknown import Head, head_of, ignored_fields
from fovea.core.errors import FoveaError, InvalidRequest
from fovea.core.json_text import is_nested_deeper
from fovea.gateway.inspect.body import prefixed
from fovea.gateway.translate.chat_reader import (
    MOST_LEVELS,
    BackendError,
    ChatReader,
    error_fields,
    is_error,
)

Event = dict[str, Any]
Writer = MessagesWriter | ResponsesWriter
MakeWriter = Callable[[str, int, NewId], Writer]
"""Returns a writer for a model's name, a Unix time in seconds, and a maker of ids."""
DONE = "[DONE]"
LONGEST_EVENT = 16 * 1024 * 1024
"""Longest event of a backend, in bytes."""
Api = Literal["messages", "responses"]
TextOf = Callable[[str], str]
"""Returns the text for which a placeholder stands, and any other text as it is."""
REFUSED: dict[str, dict[str, str]] = {
    "messages": {"mcp_servers": "a gateway runs no tools"},
    "responses": {
        "previous_response_id": "no answers are kept; send all items in input, with store: false",
        "conversation": "no conversations are kept; send all items in input",
        "prompt": "no prompts are kept; send instructions and input",
    },
}
"""Fields that need what chat completions do not have, and the reason, by API."""
_FIELDS = {"messages": fields_of(MessagesRequest), "responses": fields_of(ResponsesRequest)}


def to_chat(api: Api, body: Any, text_of: TextOf = str, *, head: Head = head_of) -> ChatTranslation:
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


@dataclass(eq=False)
class StreamTranslator:
    """Translator of one stream.

    make_writer: returns the writer of the answer; called once, when the head of it is known.
    ended: whether the last event was written. Nothing is written afterwards.
    failed: whether it was an error.
    """

    reader: ChatReader
    make_writer: Callable[[], Writer]
    error_fields: Callable[[FoveaError], dict[str, Any]]
    ended: bool = field(default=False, init=False)
    failed: bool = field(default=False, init=False)
    _writer: Writer | None = field(default=None, init=False)
    _begun: bool = field(default=False, init=False)
    _out: list[bytes] = field(default_factory=list, init=False)
    _decoder: sse.Decoder = field(default_factory=lambda: sse.Decoder(comments=True), init=False)

    def feed(self, chunk: bytes) -> bytes:
        """Add bytes of the backend's stream, cut anywhere. Returns the events that they complete, as bytes.

        It raises no error for any bytes: a stream that cannot be translated ends with an error event.
        """
        if not self.ended:
            self._feed(chunk)
        return self._written()

    def close(self, error: str | None = None) -> bytes:
        """End the stream, if it has not ended. Returns the last events.

        error: why the backend's stream broke off; None: it ended like a stream that is whole.
        """
        if not self.ended:
            if error is None:
                self._flush()
            else:
                self._fail(BackendError(error, code="backend_stream_broken"))
        return self._written()

    def _written(self) -> bytes:
        out, self._out = b"".join(self._out), []
        return out

    def _feed(self, chunk: bytes) -> None:
        for payload in self._decoder.feed(chunk):
            if len(payload) > LONGEST_EVENT:
                self._fail(_too_long())
            elif payload:
                self._read(payload)
            else:
                self._out.append(sse.COMMENT)  # it keeps the connection to the client open
            if self.ended:
                return
        if self._decoder.held > LONGEST_EVENT:
            self._fail(_too_long())

    def _flush(self) -> None:
        """Read the last event, whose empty line may be missing, and end the stream.

        After the finish reason, only token counts can come. If these broke off, the answer is whole.
        """
        for payload in self._decoder.feed(b"\n\n"):
            if payload and not self.ended and (self.reader.reason is None or _is_json(payload)):
                self._read(payload)
        if not self.ended:
            self._read(DONE)

    def _read(self, payload: str) -> None:
        """Write the events for one event of the backend."""
        try:
            if payload == DONE:
                self._finish()
            else:
                self._chunk(_parsed(payload))
        except BackendError as error:
            self._fail(error)

    def _chunk(self, chunk: dict[str, Any]) -> None:
        read = self.reader.read(chunk, "delta")
        if read is None:
            return
        self._begin()
        pieces, logprobs = read
        if pieces or logprobs:
            self._write(self._made().pieces(pieces, logprobs))

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._write(self._made().begin(self.reader.usage))

    def _finish(self) -> None:
        ending = self.reader.ending()
        self._begin()
        self._write(self._made().end(ending))
        self.ended = True

    def _fail(self, error: FoveaError) -> None:
        self.ended = self.failed = True
        self._write([self._made().failure(self.error_fields(error))])

    def _write(self, events: list[Event]) -> None:
        self._out += map(self._made().event, events)

    def _made(self) -> Writer:
        if self._writer is None:
            self._writer = self.make_writer()
        return self._writer


def _parsed(payload: str) -> dict[str, Any]:
    try:
        chunk = json.loads(payload)
    except (ValueError, RecursionError):
        raise BackendError("an event of the backend's stream is not JSON") from None
    if not isinstance(chunk, dict):
        raise BackendError("an event of the backend's stream is not a JSON object")
    # Counted first, because nearly no event has so many brackets.
    if payload.count("[") + payload.count("{") > MOST_LEVELS and is_nested_deeper(chunk, MOST_LEVELS):
        raise BackendError("an event of the backend's stream is nested too deeply")
    if is_error(chunk):
        raise BackendError.of(200, chunk)
    return chunk


def _is_json(payload: str) -> bool:
    try:
        json.loads(payload)
    except (ValueError, RecursionError):
        return False
    return True


def _too_long() -> BackendError:
    return BackendError(
        f"an event of the backend's stream is too long; accepted: at most {LONGEST_EVENT} bytes"
    )


@dataclass(frozen=True, slots=True)
class ChatTranslation:
    """A request as a chat request, and all that its answer needs.

    api: the API of the client.
    body: body of the chat request. URLs of images are what the request held, or Prefixed.
    stream: whether the client wants a stream.
    ignored: JSON paths of fields of the request that are unknown and have no effect.
    model: name of the model that the client sent; "": it sent none.
    stops: stop strings of the request.
    make_writer: returns a writer of the answer.
    rename: renames the fields in an error from those of chat requests to those of the client.
    """

    api: Api
    body: dict[str, Any]
    stream: bool
    ignored: tuple[str, ...]
    model: str
    stops: tuple[str, ...]
    make_writer: MakeWriter
    rename: Callable[[FoveaError], None]

    def answer(
        self, status: int, chat: Any, *, ids: NewId = new_id, clock: Callable[[], float] = time.time
    ) -> dict[str, Any]:
        """The body of a complete answer, from that of the backend.

        status: HTTP status of the backend's answer, which is that of the client's, too. An error becomes one
            in the form of the client's API, with the names of its fields.
        chat: the backend's body, parsed. ids, clock: make ids, and the time in seconds where it has none.

        Raises BackendError if the status is not an error and the body is not a chat completion.
        """
        if status >= 400:
            return self.refusal(BackendError.of(status, chat))
        if not isinstance(chat, dict):
            raise BackendError("the backend's answer is not a JSON object")
        if is_error(chat):
            raise BackendError.of(status, chat)
        if is_nested_deeper(chat, MOST_LEVELS):
            raise BackendError("the backend's answer is nested too deeply")
        reader = ChatReader(self.stops, ids)
        read = reader.read(chat, "message")
        if read is None:
            raise BackendError("the backend's answer has no choice")
        answer = Answer()
        for piece in read[0]:
            answer.add(piece)
        writer = self.writer(reader.model, reader.created or int(clock()), ids)
        return writer.complete(answer, reader.ending(), read[1])

    def translator(self, *, ids: NewId = new_id, clock: Callable[[], float] = time.time) -> StreamTranslator:
        """A translator of the backend's stream of events. ids, clock: as in `answer`."""
        reader = ChatReader(self.stops, ids)

        def writer() -> Writer:
            return self.writer(reader.model, reader.created or int(clock()), ids)

        return StreamTranslator(reader, writer, self.error_fields)

    def refusal(self, error: FoveaError) -> dict[str, Any]:
        """The body of an answer that is an error, with the names of the client's fields."""
        kind = {"type": "error"} if self.api == "messages" else {}
        return {**kind, "error": self.error_fields(error)}

    def error_fields(self, error: FoveaError) -> dict[str, Any]:
        """The fields of an error for an event of a stream, with the names of the client's fields."""
        self.rename(error)
        return error_fields(self.api, error)

    def writer(self, model: str, created: int, ids: NewId) -> Writer:
        """A writer of the answer. model: its name as the backend reports it; "": as the client sent it."""
        return self.make_writer(model or self.model, created, ids)


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
        lambda model, created, ids: MessagesWriter(model, ids),
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
        lambda model, created, ids: ResponsesWriter(model, echo, created, ids),
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


def _resolved(value: Any, text_of: TextOf) -> Any:
    """A copy of a JSON value with the texts for which its placeholders stand."""
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, list):
        return [_resolved(entry, text_of) for entry in value]
    if isinstance(value, dict):
        return {text_of(name): _resolved(entry, text_of) for name, entry in value.items()}
    return value
