"""Bodies of answers: complete ones, and chunks of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fovea.api import sse
from fovea.api.convert import extension_body, usage_body
from fovea.api.reading import Answer, Readers, Reading, finish_reason, new_call_id
from fovea.core.errors import EngineError, FoveaError
from fovea.core.types import Completion, Delta, TokenLogprob, Usage
from fovea.dialects.reader import Piece

LONGEST_MESSAGE = 500
LONGEST_PARAM = 200
PLAIN = Reading()
DEFECT = "the server failed on this request; see its log"


def error_body(error: FoveaError) -> dict[str, Any]:
    """The body of an error, in OpenAI's form.

    Its length is bounded, whatever of the request it repeats. Errors that are not meant for clients, such as
    those about a checkpoint, may tell about the server's files: their message stays in the server's log.
    """
    internal = error.status == 500 and not isinstance(error, EngineError)
    message = DEFECT if internal else clip(error.message, LONGEST_MESSAGE)
    param = None if error.param is None else clip(error.param, LONGEST_PARAM)
    return {"error": {"message": message, "type": error.kind, "param": param, "code": error.code}}


def clip(text: str, longest: int) -> str:
    """Leave out the middle of a text that is longer than so many characters."""
    if len(text) <= longest:
        return text
    end = longest // 3
    return f"{text[: longest - end - 3]}...{text[-end:]}"


class ChatBodies:
    """Bodies of one chat completion. All of them have the same id, model name and creation time."""

    done = sse.DONE
    event = staticmethod(sse.event)

    def __init__(self, model: str, fingerprint: str | None = None, reading: Reading = PLAIN) -> None:
        """fingerprint: names what the answer depends on beside the request.

        reading: how answers are divided into content, reasoning and tool calls.
        """
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.fingerprint = fingerprint
        self._reading = reading
        self._readers = Readers(reading)
        self._started: set[int] = set()
        self.model = model
        self.created = int(time.time())

    def complete(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The body of a complete answer. answers: exactly one."""
        [answer] = answers
        divided = [self._reading.divide(text, answer.thinking) for text in answer.texts]
        choices = [
            {
                "index": index,
                "message": message_body(message),
                "logprobs": self.logprobs(logprobs),
                "finish_reason": finish_reason(reason, bool(message.calls)),
                "stop_reason": stop,
            }
            for index, (message, reason, logprobs, stop) in enumerate(
                zip(divided, answer.finish_reasons, answer.logprobs, answer.stops, strict=True)
            )
        ]
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": usage_body(answer.usage).model_dump(),
            "fovea": extension_body(answer.timings, answer.images),
        }

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
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
        return chunks

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        """The chunks that end a stream: the token counts if the client requested them."""
        if not include_usage:
            return []
        head = self._head("chat.completion.chunk")
        return [{**head, "choices": [], "usage": usage_body(usage).model_dump()}]

    def failure(self, error: FoveaError) -> dict[str, Any]:
        """The chunk of an error that ends a stream."""
        return error_body(error)

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


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


class CompletionBodies:
    """Bodies of one text completion. With several prompts, a choice has the index prompt * n + choice."""

    done = sse.DONE
    event = staticmethod(sse.event)

    def __init__(self, model: str, fingerprint: str | None = None) -> None:
        """fingerprint: names what the answer depends on beside the request."""
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.fingerprint = fingerprint
        self.model = model
        self.created = int(time.time())

    def complete(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The body of the complete answers to all prompts, in their order."""
        choices: list[dict[str, Any]] = []
        for answer in answers:
            for text, reason, logprobs in zip(
                answer.texts, answer.finish_reasons, answer.logprobs, strict=True
            ):
                choices.append(self._choice(len(choices), text, reason, self.logprobs(logprobs)))
        total = add_usage([answer.usage for answer in answers])
        return {**self._head(), "choices": choices, "usage": usage_body(total).model_dump()}

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Log probabilities in the form of text completions; None if there are none."""
        return text_logprobs(entries) if entries else None

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a delta: one, or none while the engine holds text back."""
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return []
        choice = self._choice(delta.index, delta.text, delta.finish_reason, self.logprobs(delta.logprobs))
        return [{**self._head(), "choices": [choice]}]

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        """The chunks that end a stream: the token counts if the client requested them."""
        if not include_usage:
            return []
        return [{**self._head(), "choices": [], "usage": usage_body(usage).model_dump()}]

    def failure(self, error: FoveaError) -> dict[str, Any]:
        """The chunk of an error that ends a stream."""
        return error_body(error)

    def _choice(self, index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def add_usage(parts: list[Usage]) -> Usage:
    """The sum of the token counts of several answers."""
    return Usage(
        sum(u.prompt for u in parts),
        sum(u.completion for u in parts),
        sum(u.cached for u in parts),
        sum(u.image for u in parts),
        sum(u.reasoning for u in parts),
    )


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities in the form of chat completions."""
    content = [
        {
            **_token(entry.text, entry.logprob),
            "top_logprobs": [_token(text, logprob) for _, text, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": token_text(text), "logprob": logprob, "bytes": list(token_bytes(text))}


def token_bytes(text: str) -> bytes:
    """The bytes of a token's text. Surrogates in it stand for bytes that are not UTF-8; see TokenLogprob."""
    return text.encode("utf-8", "surrogateescape")


def token_text(text: str) -> str:
    """A token's text as JSON can hold it: bytes that are not UTF-8 become replacement characters."""
    return token_bytes(text).decode("utf-8", "replace")


def text_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities in the form of text completions."""
    return {
        "tokens": [token_text(entry.text) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{token_text(text): logprob for _, text, logprob in entry.top} for entry in entries],
    }
