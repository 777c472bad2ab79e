"""Bodies of answers of /v1/messages: whole ones, and the events of streams."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from fovea.api import sse
from fovea.api.bodies.errors import error_body
from fovea.api.convert import extension_body
from fovea.api.reading import Answer, Readers, Reading
from fovea.core.errors import FoveaError
from fovea.core.types import Completion, Delta, FinishReason, TokenLogprob, Usage
from fovea.dialects.reader import Piece

KINDS = {"content": "text", "reasoning": "thinking", "call": "tool_use", "arguments": "tool_use"}
"""The type of the block to which a piece of an answer belongs."""


class MessagesBodies:
    """Bodies of one answer."""

    done = b""

    def __init__(self, model: str, reading: Reading) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._reading = reading
        self._readers = Readers(reading)
        self._answer = Answer()
        self._begun = False
        self._index = -1
        self._open = ""
        self._reason: FinishReason | None = None
        self._stop: str | int | None = None
        self._extension: dict[str, Any] = {}

    def complete(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The body of a whole answer. answers: exactly one."""
        [answer] = answers
        divided = self._reading.divide(answer.text, answer.thinking)
        content = [_block(divided, kind, value) for kind, value in divided.parts]
        content = content or [{"type": "text", "text": "", "citations": None}]
        return {
            **self._head(content, usage_body(answer.usage)),
            **ending(answer.finish_reasons[0], bool(divided.calls), answer.stops[0]),
            "fovea": extension_body(answer.timings, answer.images),
        }

    def logprobs(self, entries: Sequence[TokenLogprob], start: int = 0) -> dict[str, Any] | None:
        """This API has no log probabilities."""
        return None

    def event(self, payload: dict[str, Any]) -> bytes:
        return sse.named_event(payload)

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of a delta."""
        events: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            usage = usage_body(Usage(delta.prompt_tokens, cached=delta.cached_tokens))
            events.append({"type": "message_start", "message": self._head([], usage)})
        for piece in self._readers.read(delta):
            self._answer.add(piece)
            events += self._piece(piece)
        self._reason = delta.finish_reason or self._reason
        self._stop = delta.stop if delta.stop is not None else self._stop
        if delta.timings is not None:
            self._extension = {"fovea": extension_body(delta.timings, delta.images)}
        return events

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        """The events that end a stream."""
        events = self._close()
        if self._index < 0:
            events += [*self._begin({"type": "text", "text": ""}), *self._close()]
        ends = ending(self._reason, self._readers.has_calls(0), self._stop)
        return [
            *events,
            {"type": "message_delta", "delta": ends, "usage": usage_body(usage), **self._extension},
            {"type": "message_stop"},
        ]

    def failure(self, error: FoveaError) -> dict[str, Any]:
        """The event of an error that ends a stream."""
        body = error_body(error)["error"]
        return {"type": "error", "error": body}

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
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _block(answer: Answer, kind: str, value: str | int) -> dict[str, Any]:
    """The block of a part of a divided answer."""
    if isinstance(value, int):
        call = answer.calls[value]
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
    if kind == "content":
        return {"type": "text", "text": value, "citations": None}
    return {"type": "thinking", "thinking": value, "signature": ""}


def ending(reason: FinishReason | None, has_calls: bool, stop: str | int | None) -> dict[str, Any]:
    """Why an answer has ended, in Anthropic's words."""
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


def usage_body(usage: Usage) -> dict[str, Any]:
    """The token counts of an answer. Those of the prompt are divided by whether they were cached."""
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
