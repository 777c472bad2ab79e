"""Answers of OpenAI's /v1/responses: complete bodies, and the events of streams.

`ResponsesWriter` writes them from divided answers. It knows neither engines nor dialects, so that a server
and a gateway write the same bodies. `ResponsesBodies` feeds it from the deltas of an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fovea.api import sse
from fovea.api.convert import extension_body
from fovea.api.errors import error_body
from fovea.api.logprobs import chat_logprobs
from fovea.api.reading import Answer, Ending, NewId, Readers, Reading, new_id
from fovea.api.responses_request import ResponsesRequest
from fovea.core.constraints import ToolCall
from fovea.core.errors import FoveaError
from fovea.core.types import Completion, Delta, FinishReason, TokenLogprob, Usage
from fovea.dialects.reader import Piece

Item = dict[str, Any]
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""The reason why an answer is incomplete, by its finish reason."""


class ResponsesWriter:
    """Writer of one answer.

    id: name of the answer.
    model: name of the model. It may be set until the first body or event is written.
    created: Unix time in seconds. It may be set until then, too.
    answer: the pieces of a stream so far.
    """

    def __init__(self, model: str, echo: dict[str, Any], created: int, ids: NewId = new_id) -> None:
        """echo: fields of the request that the answer repeats, see `echoed`. ids: makes the ids of items."""
        self._ids = ids
        self.id = ids("resp")
        self.model = model
        self.created = created
        self.answer = Answer()
        self._echo = echo
        self._items: list[Item] = []
        self._open: Item | None = None
        self._begun = False
        self._number = 0
        self._logprobs: list[Any] = []

    def complete(self, answer: Answer, ending: Ending, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        """The body of a complete answer. logprobs: of its tokens, in the form of chat completions."""
        self._items = [self._item(answer, kind, value) for kind, value in answer.parts]
        self._items = self._items or [self._message_item("")]
        message = next((item for item in self._items if item["type"] == "message"), None)
        if message is not None:
            message["content"][0]["logprobs"] = list(logprobs)
        return self._body(ending)

    def event(self, payload: dict[str, Any]) -> bytes:
        """Write one event, with its number in the stream."""
        numbered = {**payload, "sequence_number": self._number}
        self._number += 1
        return sse.named_event(numbered)

    def begin(self, usage: Usage | None = None) -> list[dict[str, Any]]:
        """The events that begin a stream; none if it has begun. usage: without effect."""
        if self._begun:
            return []
        self._begun = True
        begun = self._body(None)
        return [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]

    def pieces(self, pieces: Sequence[Piece], logprobs: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The events of the next pieces of the answer.

        logprobs: of the tokens that these pieces are, in the form of chat completions.
        """
        self._logprobs += logprobs
        events: list[dict[str, Any]] = []
        for piece in pieces:
            self.answer.add(piece)
            events += self._piece(piece)
        return events

    def end(self, ending: Ending) -> list[dict[str, Any]]:
        """The events that end a stream. The last one holds the body of the whole answer."""
        events = self._close()
        if not self._items:
            events += [*self._begin(self._message_item("")), *self._close()]
        body = self._body(ending)
        return [*events, {"type": f"response.{body['status']}", "response": body}]

    def failure(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The event of an error that ends a stream. fields: type, message, param and code of the error."""
        return {"type": "error", **{name: fields[name] for name in ("code", "message", "param")}}

    def _piece(self, piece: Piece) -> list[dict[str, Any]]:
        kind = {"content": "message", "reasoning": "reasoning"}.get(piece.kind, "function_call")
        events: list[dict[str, Any]] = []
        if piece.kind == "call":
            call = ToolCall(piece.text, "", self.answer.calls[-1].id)
            return [*self._close(), *self._begin(self._call_item(call))]
        if self._open is None or self._open["type"] != kind:
            new = self._message_item("") if kind == "message" else self._reasoning_item("")
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
        events = [{"type": "response.output_item.added", "output_index": len(self._items), "item": added}]
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

    def _body(self, ending: Ending | None) -> dict[str, Any]:
        """The answer as far as it is known. ending: None: it goes on."""
        reason = None if ending is None else INCOMPLETE.get(ending.reason or "")
        status = "completed" if reason is None else "incomplete"
        usage = None if ending is None else ending.usage
        body = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": "in_progress" if ending is None else status,
            "background": False,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": self.model,
            "output": list(self._items),
            **self._echo,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }
        if ending is not None and ending.extension is not None:
            body["fovea"] = ending.extension
        return body

    def _item(self, answer: Answer, kind: str, value: str | int) -> Item:
        """The item of a part of a divided answer."""
        if isinstance(value, int):
            return self._call_item(answer.calls[value])
        return self._message_item(value) if kind == "content" else self._reasoning_item(value)

    def _message_item(self, text: str) -> Item:
        part: Item = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        kind = {"id": self._ids("msg"), "type": "message", "role": "assistant"}
        return {**kind, "status": "completed", "content": [part]}

    def _reasoning_item(self, text: str) -> Item:
        part = {"type": "reasoning_text", "text": text}
        kind = {"id": self._ids("rs"), "type": "reasoning", "summary": []}
        return {**kind, "status": "completed", "content": [part]}

    def _call_item(self, call: ToolCall) -> Item:
        kind = {"id": self._ids("fc"), "type": "function_call", "status": "completed"}
        return {**kind, "call_id": call.id, "name": call.name, "arguments": call.arguments}


def echoed(request: ResponsesRequest) -> dict[str, Any]:
    """The fields of a request that its answer repeats, with the defaults of those that it leaves out."""
    text = {"format": {"type": "text"}}
    if request.text is not None and request.text.format is not None:
        text["format"] = request.text.format.model_dump(by_alias=True, exclude_none=True)
    choice = request.tool_choice
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "previous_response_id": request.previous_response_id,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "store": request.store is not False,
        "text": text,
        "tool_choice": choice or "auto" if isinstance(choice, str | None) else choice.model_dump(),
        "tools": [
            {"description": None, "parameters": None, "strict": None, **tool.model_dump()}
            for tool in request.tools or ()
        ],
        "user": request.user,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": 0,
            "image_tokens": usage.image,
            "dropped_tokens": usage.dropped,
        },
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


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
