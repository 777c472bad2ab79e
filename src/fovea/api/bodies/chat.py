"""Bodies of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fovea.api.bodies.base import BodyOptions, CompletionWriter
from fovea.api.bodies.logprobs import chat_logprobs, prompt_logprobs
from fovea.api.convert import extension_body, usage_body
from fovea.api.reading import Answer, Readers, Reading, finish_reason, new_call_id
from fovea.core.types import Completion, Delta, TokenLogprob
from fovea.dialects.reader import Piece

PLAIN = Reading()


class ChatBodies(CompletionWriter):
    """Bodies of one chat completion."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, options: BodyOptions | None = None, reading: Reading = PLAIN) -> None:
        """reading: how answers are divided into content, reasoning and tool calls."""
        super().__init__(model, options)
        self._reading = reading
        self._readers = Readers(reading)
        self._started: set[int] = set()

    def complete(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The body of a complete answer. answers: exactly one."""
        [answer] = answers
        choices = []
        for index, text in enumerate(answer.texts):
            message = self._reading.divide(text, answer.thinking)
            choice = {
                "index": index,
                "message": message_body(message),
                "logprobs": self.logprobs(answer.logprobs[index]),
                "finish_reason": finish_reason(answer.finish_reasons[index], bool(message.calls)),
                "stop_reason": answer.stops[index] if answer.stops else None,
            }
            if self.options.token_ids:
                choice["token_ids"] = list(answer.token_ids[index])
            choices.append(choice)
        body = {
            **self.head(self.kind),
            "choices": choices,
            "usage": usage_body(answer.usage).model_dump(),
            "fovea": extension_body(answer.timings, answer.images),
        }
        if answer.prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs)
        if self.options.token_ids:
            body["prompt_token_ids"] = list(answer.prompt_ids)
        return body

    def logprobs(self, entries: Sequence[TokenLogprob], length: int = 0) -> dict[str, Any] | None:
        """Log probabilities in the form of chat completions; None if there are none."""
        return chat_logprobs(entries) if entries else None

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a delta. There is none with text while text is held back.

        The first chunk of a choice holds its role. The last chunk of an answer holds the `fovea` field.
        """
        chunks = []
        if delta.index not in self._started:
            self._started.add(delta.index)
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}, None, None))
        parts = [delta_body(piece) for piece in self._readers.read(delta)]
        if not parts and (delta.logprobs or delta.finish_reason):
            parts.append({"content": ""} if delta.logprobs else {})
        reason = finish_reason(delta.finish_reason, self._readers.has_calls(delta.index))
        logprobs = self.logprobs(delta.logprobs)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            chunks.append(
                self._chunk(delta.index, part, None if number else logprobs, reason if last else None)
            )
        if delta.timings is not None:
            chunks[-1]["fovea"] = extension_body(delta.timings, delta.images)
        return self.finish_chunks(delta, chunks)

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self.head(self.chunk_kind), "choices": [choice]}


def message_body(answer: Answer) -> dict[str, Any]:
    """A divided answer as a message. Its text is null if it has tool calls instead."""
    body: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content if answer.content or not answer.calls else None,
        "refusal": None,
    }
    if answer.calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    if answer.reasoning:
        body |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
    return body


def delta_body(piece: Piece) -> dict[str, Any]:
    """A piece of an answer as the `delta` of a chunk.

    Reasoning has the name that vLLM uses now and the older one, because clients read either.
    """
    if piece.kind == "content":
        return {"content": piece.text}
    if piece.kind == "reasoning":
        return {"reasoning": piece.text, "reasoning_content": piece.text}
    call: dict[str, Any] = {"index": piece.index}
    if piece.kind == "call":
        call |= {"id": new_call_id(), "type": "function"}
        call["function"] = {"name": piece.text, "arguments": ""}
    else:
        call["function"] = {"arguments": piece.text}
    return {"tool_calls": [call]}
