"""Turns a backend's stream of chat completion chunks into the events of another API, as bytes arrive.

    bytes -> sse.Decoder -> one chunk's JSON -> ChatReader -> pieces -> writer of the API -> events -> bytes

The stream ends exactly once: with the API's last event when the backend has named a finish reason and has
ended its stream, or with an error event otherwise. The end of an answer is written only at the end of the
backend's stream, because the token counts come last.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fovea.api import sse
from fovea.core.errors import FoveaError
from fovea.core.json_text import is_nested_deeper
from fovea.core.types import Usage
from fovea.gateway.translate.chat_reader import ChatReader
from fovea.gateway.translate.errors import MOST_LEVELS, BackendError, is_error
from fovea.gateway.translate.writer import Event, Writer

DONE = "[DONE]"
LONGEST_EVENT = 16 * 1024 * 1024
"""Longest event of a backend, in bytes."""


class StreamTranslator:
    """Translator of one stream.

    ended: whether the last event was written. Nothing is written afterwards.
    failed: whether it was an error.
    """

    __slots__ = (
        "_begun",
        "_decoder",
        "_error_fields",
        "_make",
        "_out",
        "_reader",
        "_writer",
        "ended",
        "failed",
    )

    def __init__(
        self,
        reader: ChatReader,
        make_writer: Callable[[], Writer],
        error_fields: Callable[[FoveaError], dict[str, Any]],
    ) -> None:
        """make_writer: returns the writer of the answer; called once, when the head of it is known."""
        self.ended = False
        self.failed = False
        self._reader = reader
        self._make = make_writer
        self._error_fields = error_fields
        self._writer: Writer | None = None
        self._begun = False
        self._out: list[bytes] = []
        self._decoder = sse.Decoder(comments=True)

    @property
    def usage(self) -> Usage | None:
        """Token counts that the backend has reported so far; None: it has reported none."""
        return self._reader.usage

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
            if payload and not self.ended and (self._reader.reason is None or _is_json(payload)):
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
        read = self._reader.read(chunk, "delta")
        if read is None:
            return
        self._begin()
        pieces, logprobs = read
        if pieces or logprobs:
            self._write(self._made().pieces(pieces, logprobs))

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._write(self._made().begin(self._reader.usage))

    def _finish(self) -> None:
        ending = self._reader.ending()
        self._begin()
        self._write(self._made().end(ending))
        self.ended = True

    def _fail(self, error: FoveaError) -> None:
        self.ended = self.failed = True
        self._write([self._made().failure(self._error_fields(error))])

    def _write(self, events: list[Event]) -> None:
        self._out += map(self._made().event, events)

    def _made(self) -> Writer:
        if self._writer is None:
            self._writer = self._make()
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
