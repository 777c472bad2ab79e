"""Bodies of answers of /v1/responses: whole ones, and the events of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fovea.api import sse
from fovea.api.bodies.errors import error_body
from fovea.api.bodies.logprobs import chat_logprobs
from fovea.api.convert import extension_body
from fovea.api.reading import Answer, Readers, Reading, new_call_id
from fovea.api.responses.request import ResponsesRequest
from fovea.core.errors import FoveaError
from fovea.core.tools import ToolCall
from fovea.core.types import Completion, Delta, FinishReason, TokenLogprob, Usage
from fovea.dialects.reader import Piece

Item = dict[str, Any]


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
        self.id = _new_id("resp")
        self._request = request
        self._reading = reading
        self._keep = keep
        self._model = model
        self._created = int(time.time())
        self._readers = Readers(reading)
        self._answer = Answer()
        self._items: list[Item] = []
        self._open: Item | None = None
        self._number = 0
        self._logprobs: list[Any] = []
        self._reason: FinishReason | None = None
        self._extension: dict[str, Any] | None = None

    def complete(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The body of a whole answer. answers: exactly one."""
        [answer] = answers
        divided = self._reading.divide(answer.text, answer.thinking)
        items = [self._item(divided, kind, value) for kind, value in divided.parts]
        items = items or [_message_item("", [])]
        message = next((item for item in items if item["type"] == "message"), None)
        if message is not None:
            message["content"][0]["logprobs"] = _logprobs(answer.logprobs[0])
        self._items, self._reason = items, answer.finish_reasons[0]
        self._extension = extension_body(answer.timings, answer.images)
        body = self._body(answer.usage)
        self._keep(body, divided)
        return body

    @staticmethod
    def _item(answer: Answer, kind: str, value: str | int) -> Item:
        """The item of a part of a divided answer."""
        if isinstance(value, int):
            return _call_item(answer.calls[value])
        return _message_item(value, []) if kind == "content" else _reasoning_item(value)

    def logprobs(self, entries: Sequence[TokenLogprob], start: int = 0) -> dict[str, Any] | None:
        """Log probabilities in the form of chat completions; None if there are none."""
        return chat_logprobs(entries) if entries else None

    def event(self, payload: dict[str, Any]) -> bytes:
        """Write one event, with its number in the stream."""
        numbered = {**payload, "sequence_number": self._number}
        self._number += 1
        return sse.named_event(numbered)

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of a delta."""
        events: list[dict[str, Any]] = []
        if self._number == 0:
            begun = self._body(None)
            events += [
                {"type": "response.created", "response": begun},
                {"type": "response.in_progress", "response": begun},
            ]
        self._logprobs += _logprobs(delta.logprobs)
        for piece in self._readers.read(delta):
            self._answer.add(piece)
            events += self._piece(piece)
        self._reason = delta.finish_reason or self._reason
        if delta.timings is not None:
            self._extension = extension_body(delta.timings, delta.images)
        return events

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        """The events that end a stream."""
        events = self._close()
        if not self._items:
            events += [*self._begin(_message_item("", [])), *self._close()]
        body = self._body(usage)
        self._keep(body, self._answer)
        return [*events, {"type": f"response.{body['status']}", "response": body}]

    def failure(self, error: FoveaError) -> dict[str, Any]:
        """The event of an error that ends a stream."""
        body = error_body(error)["error"]
        return {"type": "error", "code": body["code"], "message": body["message"], "param": body["param"]}

    def _piece(self, piece: Piece) -> list[dict[str, Any]]:
        kind = {"content": "message", "reasoning": "reasoning"}.get(piece.kind, "function_call")
        events: list[dict[str, Any]] = []
        if piece.kind == "call":
            call = ToolCall(piece.text, "", self._answer.calls[-1].id)
            return [*self._close(), *self._begin(_call_item(call))]
        if self._open is None or self._open["type"] != kind:
            new = _message_item("", []) if kind == "message" else _reasoning_item("")
            events += [*self._close(), *self._begin(new)]
        assert self._open is not None
        if kind == "function_call":
            self._open["arguments"] += piece.text
            return [*events, self._at("response.function_call_arguments.delta", delta=piece.text)]
        part = self._open["content"][0]
        part["text"] += piece.text
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        more = {}
        if kind == "message":
            part["logprobs"] += self._logprobs
            more["logprobs"], self._logprobs = self._logprobs, []
        return [*events, self._at(name, content_index=0, delta=piece.text, **more)]

    def _begin(self, item: Item) -> list[dict[str, Any]]:
        """Open an item."""
        self._open = {**item, "status": "in_progress"}
        added = {**self._open, **({"content": []} if "content" in item else {})}
        events = [
            {"type": "response.output_item.added", "output_index": len(self._items), "item": added},
        ]
        if "content" in item:
            part = dict(item["content"][0])
            events.append(self._at("response.content_part.added", content_index=0, part=part))
        return events

    def _close(self) -> list[dict[str, Any]]:
        """Close the open item, if there is one."""
        item = self._open
        if item is None:
            return []
        events = []
        if item["type"] == "function_call":
            arguments, name = item["arguments"], item["name"]
            events.append(self._at("response.function_call_arguments.done", arguments=arguments, name=name))
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"] += self._logprobs  # of tokens whose text was held back to the end
                self._logprobs = []
                values = {"text": part["text"], "logprobs": part["logprobs"]}
                events.append(self._at("response.output_text.done", content_index=0, **values))
            else:
                events.append(self._at("response.reasoning_text.done", content_index=0, text=part["text"]))
            events.append(self._at("response.content_part.done", content_index=0, part=part))
        done = {**item, "status": "completed"}
        events.append({"type": "response.output_item.done", "output_index": len(self._items), "item": done})
        self._items.append(done)
        self._open = None
        return events

    def _at(self, event: str, **values: Any) -> dict[str, Any]:
        """An event about the open item."""
        assert self._open is not None
        return {"type": event, "item_id": self._open["id"], "output_index": len(self._items), **values}

    def _body(self, usage: Usage | None) -> dict[str, Any]:
        """The answer as far as it is known. usage: None: it goes on."""
        request = self._request
        status = "in_progress" if usage is None else "completed"
        incomplete = None
        if usage is not None and self._reason == "length":
            status, incomplete = "incomplete", {"reason": "max_output_tokens"}
        asked = request.model_dump(
            mode="json",
            by_alias=True,
            include={"instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p"},
        )
        text = {"format": {"type": "text"}}
        if request.text is not None and request.text.format is not None:
            text["format"] = request.text.format.model_dump(by_alias=True, exclude_none=True)
        choice = request.tool_choice
        body = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "model": self._model,
            "output": list(self._items),
            **asked,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "store": request.store is not False,
            "text": text,
            "tool_choice": choice if isinstance(choice, str | None) else choice.model_dump(),
            "tools": [
                {"description": None, "parameters": None, "strict": None, **tool.model_dump()}
                for tool in request.tools or ()
            ],
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": request.user,
        }
        if body["tool_choice"] is None:
            body["tool_choice"] = "auto"
        if usage is not None and self._extension is not None:
            body["fovea"] = self._extension
        return body


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": 0,
            "image_tokens": usage.image,
        },
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _message_item(text: str, logprobs: list[Any]) -> Item:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {
        "id": _new_id("msg"),
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _reasoning_item(text: str) -> Item:
    part = {"type": "reasoning_text", "text": text}
    return {"id": _new_id("rs"), "type": "reasoning", "summary": [], "status": "completed", "content": [part]}


def _call_item(call: ToolCall) -> Item:
    return {
        "id": _new_id("fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": call.id or new_call_id(),
        "name": call.name,
        "arguments": call.arguments,
    }


def _logprobs(entries: Sequence[TokenLogprob]) -> list[Any]:
    content: list[Any] = chat_logprobs(entries)["content"] if entries else []
    return content


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
