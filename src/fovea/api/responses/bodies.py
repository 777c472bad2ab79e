"""Bodies of answers of /v1/responses from the answers of an engine: whole ones, and the events of streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fovea.api.bodies.errors import error_body
from fovea.api.bodies.logprobs import chat_logprobs
from fovea.api.convert import extension_body
from fovea.api.ending import Ending
from fovea.api.reading import Answer, Readers, Reading
from fovea.api.responses.request import ResponsesRequest
from fovea.api.responses.writer import ResponsesWriter, echoed
from fovea.core.errors import FoveaError
from fovea.core.types import Completion, Delta, FinishReason, TokenLogprob, Usage


class ResponsesBodies:
    """Bodies of one answer.

    id: name of the answer, by which later requests continue it.
    """

    done = b""

    def __init__(
        self,
        model: str,
        request: ResponsesRequest,
        reading: Reading,
        keep: Callable[[dict[str, Any], Answer], None] = lambda body, answer: None,
    ) -> None:
        """keep: called with the whole answer, as body and divided, once it has ended without an error."""
        self._writer = ResponsesWriter(model, echoed(request), int(time.time()))
        self.id = self._writer.id
        self._reading = reading
        self._keep = keep
        self._readers = Readers(reading)
        self._reason: FinishReason | None = None
        self._extension: dict[str, Any] | None = None

    def complete(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The body of a whole answer. answers: exactly one."""
        [answer] = answers
        divided = self._reading.divide(answer.text, answer.thinking)
        extension = extension_body(answer.timings, answer.images)
        ending = Ending(answer.finish_reasons[0], usage=answer.usage, extension=extension)
        body = self._writer.complete(divided, ending, _logprobs(answer.logprobs[0]))
        self._keep(body, divided)
        return body

    def logprobs(self, entries: Sequence[TokenLogprob], length: int = 0) -> dict[str, Any] | None:
        """Log probabilities in the form of chat completions; None if there are none."""
        return chat_logprobs(entries) if entries else None

    def event(self, payload: dict[str, Any]) -> bytes:
        """Write one event, with its number in the stream."""
        return self._writer.event(payload)

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of a delta."""
        events = self._writer.begin()
        events += self._writer.pieces(self._readers.read(delta), _logprobs(delta.logprobs))
        self._reason = delta.finish_reason or self._reason
        if delta.timings is not None:
            self._extension = extension_body(delta.timings, delta.images)
        return events

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        """The events that end a stream."""
        events = self._writer.end(Ending(self._reason, usage=usage, extension=self._extension))
        self._keep(events[-1]["response"], self._writer.answer)
        return events

    def failure(self, error: FoveaError) -> dict[str, Any]:
        """The event of an error that ends a stream."""
        return self._writer.failure(error_body(error)["error"])


def _logprobs(entries: Sequence[TokenLogprob]) -> list[Any]:
    content: list[Any] = chat_logprobs(entries)["content"] if entries else []
    return content
