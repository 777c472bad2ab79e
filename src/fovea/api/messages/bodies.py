"""Bodies of answers of /v1/messages from the answers of an engine: whole ones, and the events of streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fovea.api.bodies.errors import error_body
from fovea.api.convert import extension_body
from fovea.api.ending import Ending
from fovea.api.messages.writer import MessagesWriter
from fovea.api.reading import Readers, Reading
from fovea.core.errors import FoveaError
from fovea.core.types import Completion, Delta, FinishReason, TokenLogprob, Usage


class MessagesBodies:
    """Bodies of one answer."""

    done = b""

    def __init__(self, model: str, reading: Reading) -> None:
        self._writer = MessagesWriter(model)
        self._reading = reading
        self._readers = Readers(reading)
        self._reason: FinishReason | None = None
        self._stop: str | int | None = None
        self._extension: dict[str, Any] | None = None

    def complete(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The body of a whole answer. answers: exactly one."""
        [answer] = answers
        divided = self._reading.divide(answer.text, answer.thinking)
        extension = extension_body(answer.timings, answer.images)
        ending = Ending(answer.finish_reasons[0], answer.stops[0], answer.usage, extension)
        return self._writer.complete(divided, ending)

    def logprobs(self, entries: Sequence[TokenLogprob], length: int = 0) -> dict[str, Any] | None:
        """This API has no log probabilities."""
        return None

    def event(self, payload: dict[str, Any]) -> bytes:
        """Write one event."""
        return self._writer.event(payload)

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of a delta."""
        events = self._writer.begin(Usage(delta.prompt_tokens, cached=delta.cached_tokens))
        events += self._writer.pieces(self._readers.read(delta))
        self._reason = delta.finish_reason or self._reason
        self._stop = delta.stop if delta.stop is not None else self._stop
        if delta.timings is not None:
            self._extension = extension_body(delta.timings, delta.images)
        return events

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        """The events that end a stream."""
        return self._writer.end(Ending(self._reason, self._stop, usage, self._extension))

    def failure(self, error: FoveaError) -> dict[str, Any]:
        """The event of an error that ends a stream."""
        return self._writer.failure(error_body(error)["error"])
