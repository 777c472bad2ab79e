"""One request of another API as a chat request, and the way back for its answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fovea.api.reading import Answer, NewId, new_id
from fovea.core.errors import FoveaError
from fovea.core.json_text import is_nested_deeper
from fovea.gateway.translate.chat_reader import ChatReader
from fovea.gateway.translate.errors import MOST_LEVELS, BackendError, error_fields, is_error, refusal
from fovea.gateway.translate.stream import StreamTranslator
from fovea.gateway.translate.writer import MakeWriter, Writer

Api = Literal["messages", "responses"]


@dataclass(frozen=True, slots=True)
class ChatTranslation:
    """A request as a chat request, and all that its answer needs.

    api: the API of the client.
    body: body of the chat request. URLs of images are what the request held, or Prefixed.
    stream: whether the client wants a stream.
    ignored: JSON paths of fields of the request that are unknown and have no effect.
    extensions: fields of `body` that OpenAI's own API does not have; engines have them, hosted APIs refuse
        them.
    model: name of the model that the client sent; "": it sent none.
    stops: stop strings of the request.
    make_writer: returns a writer of the answer.
    rename: renames the fields in an error from those of chat requests to those of the client.
    """

    api: Api
    body: dict[str, Any]
    stream: bool
    ignored: tuple[str, ...]
    extensions: tuple[str, ...]
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

        Raises BackendError if the status is no error and the body is no chat completion.
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
        self.rename(error)
        return refusal(self.api, error)

    def error_fields(self, error: FoveaError) -> dict[str, Any]:
        """The fields of an error for an event of a stream, with the names of the client's fields."""
        self.rename(error)
        return error_fields(self.api, error)

    def writer(self, model: str, created: int, ids: NewId) -> Writer:
        """A writer of the answer. model: its name as the backend reports it; "": as the client sent it."""
        return self.make_writer(model or self.model, created, ids)
