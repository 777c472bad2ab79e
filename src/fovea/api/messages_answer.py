"""Answers of Anthropic's /v1/messages: complete bodies, and the events of streams.

`MessagesWriter` writes them from divided answers. It knows neither engines nor dialects, so that a server and
a gateway write the same bodies. `MessagesBodies` feeds it from the deltas of an engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fovea.api import sse
from fovea.api.convert import extension_body
from fovea.api.errors import error_body
from fovea.api.reading import Answer, Ending, NewId, Readers, Reading, new_id
from fovea.core.errors import FoveaError
from fovea.core.types import Completion, Delta, FinishReason, TokenLogprob, Usage
from fovea.dialects.reader import Piece

KINDS = {"content": "text", "reasoning": "thinking", "call": "tool_use", "arguments": "tool_use"}
"""The type of the block to which a piece of an answer belongs."""
EMPTY_TEXT = {"type": "text", "text": "", "citations": None}


class MessagesWriter:
    """Writer of one answer.

    model: name of the model. It may be set until the first body or event is written.
    """

    event = staticmethod(sse.named_event)

    def __init__(self, model: str, ids: NewId = new_id) -> None:
        """ids: makes the id of the answer."""
        self.id = ids("msg")
        self.model = model
        self._answer = Answer()
        self._begun = False
        self._index = -1
        self._open = ""

    def complete(self, answer: Answer, ending: Ending, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        """The body of a complete answer. logprobs: without effect, because this API has none."""
        content = [_block(answer, kind, value) for kind, value in answer.parts] or [dict(EMPTY_TEXT)]
        body = {**self._head(content, usage_body(ending.usage)), **ending_body(ending, bool(answer.calls))}
        if ending.extension is not None:
            body["fovea"] = ending.extension
        return body

    def begin(self, usage: Usage | None = None) -> list[dict[str, Any]]:
        """The event that begins a stream; none if it has begun. usage: token counts so far."""
        if self._begun:
            return []
        self._begun = True
        return [{"type": "message_start", "message": self._head([], usage_body(usage))}]

    def pieces(self, pieces: Sequence[Piece], logprobs: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The events of the next pieces of the answer. logprobs: without effect."""
        events: list[dict[str, Any]] = []
        for piece in pieces:
            self._answer.add(piece)
            events += self._piece(piece)
        return events

    def end(self, ending: Ending) -> list[dict[str, Any]]:
        """The events that end a stream."""
        events = self._close()
        if self._index < 0:
            events += [*self._begin({"type": "text", "text": ""}), *self._close()]
        delta = ending_body(ending, bool(self._answer.calls))
        last = {"type": "message_delta", "delta": delta, "usage": usage_body(ending.usage)}
        if ending.extension is not None:
            last["fovea"] = ending.extension
        return [*events, last, {"type": "message_stop"}]

    def failure(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The event of an error that ends a stream. fields: type, message, param and code of the error."""
        return {"type": "error", "error": fields}

    def _piece(self, piece: Piece) -> list[dict[str, Any]]:
        kind = KINDS[piece.kind]
        if piece.kind == "call":
            call = self._answer.calls[-1]
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            return [*self._close(), *self._begin(block)]
        events: list[dict[str, Any]] = []
        if self._open != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            events += [*self._close(), *self._begin({"type": kind, kind: "", **more})]
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": piece.text}
        else:
            delta = {"type": f"{kind}_delta", kind: piece.text}
        return [*events, {"type": "content_block_delta", "index": self._index, "delta": delta}]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self._index += 1
        self._open = block["type"]
        return [{"type": "content_block_start", "index": self._index, "content_block": block}]

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": self._index}]

    def _head(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip


def _block(answer: Answer, kind: str, value: str | int) -> dict[str, Any]:
    """The block of a part of a divided answer."""
    if isinstance(value, int):
        call = answer.calls[value]
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
    if kind == "content":
        return {**EMPTY_TEXT, "text": value}
    return {"type": "thinking", "thinking": value, "signature": ""}


def ending_body(ending: Ending, has_calls: bool) -> dict[str, Any]:
    """Why an answer has ended, in Anthropic's words."""
    if ending.reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if ending.reason == "content_filter":
        return {"stop_reason": "refusal", "stop_sequence": None}
    if isinstance(ending.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop}
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


def usage_body(usage: Usage | None) -> dict[str, Any]:
    """The token counts of an answer. Those of the prompt are divided by whether they were cached.

    usage: None: unknown. The API has no word for this, so the counts are 0.
    """
    usage = usage or Usage()
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    }


def _input(arguments: str) -> Any:
    """The arguments of a call as an object. Those that the length limit has cut are left out."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


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
