"""Bodies of chat completions and text completions in OpenAI's form: whole ones, and chunks of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from fovea.api import sse
from fovea.api.convert import extension_body, usage_body
from fovea.api.errors import error_body
from fovea.api.logprobs import chat_logprobs, prompt_logprobs, text_logprobs
from fovea.api.reading import Answer, Readers, Reading, finish_reason, new_call_id
from fovea.api.schema import Sampling
from fovea.core.errors import FoveaError
from fovea.core.types import Completion, Delta, TokenLogprob, Usage
from fovea.dialects.reader import Piece


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """Options of the body of an answer.

    fingerprint: names what the answer depends on beside the request.
    request_id: part of the answer's id; None: a random one.
    token_ids: whether choices hold the ids of their tokens.
    running_usage: whether every chunk holds the token counts so far.
    """

    fingerprint: str | None = None
    request_id: str | None = None
    token_ids: bool = False
    running_usage: bool = False

    @classmethod
    def of(cls, body: Sampling, fingerprint: str) -> BodyOptions:
        """The options of a request."""
        running = bool(body.stream_options and body.stream_options.continuous_usage_stats)
        return cls(fingerprint, body.request_id, bool(body.return_token_ids), running)


class CompletionWriter:
    """Writer of the bodies of one answer. All of them have the same id, model name and creation time.

    kind, chunk_kind: field `object` of complete bodies, and of chunks. prefix: of the id.
    """

    kind = ""
    chunk_kind = ""
    prefix = ""
    done = sse.DONE
    event = staticmethod(sse.event)

    def __init__(self, model: str, options: BodyOptions | None = None) -> None:
        self.options = options or BodyOptions()
        self.id = f"{self.prefix}-{self.options.request_id or uuid.uuid4().hex}"
        self.model = model
        self.created = int(time.time())
        self._completion = 0
        self._prompt_ids: tuple[int, ...] = ()
        self._held_ids: dict[int, list[int]] = {}

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        """The chunks that end a stream: the token counts if the client requested them."""
        if not include_usage:
            return []
        head = self.head(self.chunk_kind)
        return [{**head, "choices": [], "usage": usage_body(usage).model_dump()}]

    def failure(self, error: FoveaError) -> dict[str, Any]:
        """The chunk of an error that ends a stream."""
        return error_body(error)

    def head(self, kind: str) -> dict[str, Any]:
        """The fields with which every body begins."""
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.options.fingerprint,
        }  # fmt: skip

    def finish_chunks(self, delta: Delta, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add what the options ask for to the chunks of a delta.

        Token ids wait for the next chunk if the delta has none, because its text is held back.
        """
        self._completion += len(delta.token_ids)
        if delta.finish_reason is not None and chunks:
            chunks[-1]["choices"][0]["stop_reason"] = delta.stop
        if self.options.token_ids:
            held = self._held_ids.setdefault(delta.index, [])
            held += delta.token_ids
            if chunks:
                chunks[-1]["choices"][0]["token_ids"] = list(held)
                held.clear()
            self._prompt_ids += delta.prompt_ids
            if self._prompt_ids and chunks:
                chunks[0]["prompt_token_ids"] = list(self._prompt_ids)
                self._prompt_ids = ()
        if self.options.running_usage:
            so_far = Usage(delta.prompt_tokens, self._completion, delta.cached_tokens)
            for chunk in chunks:
                chunk["usage"] = usage_body(so_far).model_dump()
        return chunks


def add_usage(parts: list[Usage]) -> Usage:
    """The sum of the token counts of several answers."""
    return Usage(*map(sum, zip(*map(astuple, parts), strict=True)))


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
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
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


class CompletionBodies(CompletionWriter):
    """Bodies of one text completion. With several prompts, a choice has the index prompt * n + choice."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, options: BodyOptions | None = None) -> None:
        super().__init__(model, options)
        self._sent: dict[int, int] = {}
        self._held: dict[int, list[TokenLogprob]] = {}

    def complete(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The body of the complete answers to all prompts, in their order."""
        choices: list[dict[str, Any]] = []
        for answer in answers:
            for index, text in enumerate(answer.texts):
                logprobs = self.logprobs(answer.logprobs[index], len(text))
                choice = self._choice(len(choices), text, answer.finish_reasons[index], logprobs)
                choice["stop_reason"] = answer.stops[index] if answer.stops else None
                if answer.prompt_logprobs:
                    choice["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs)
                if self.options.token_ids:
                    choice["token_ids"] = list(answer.token_ids[index])
                    choice["prompt_token_ids"] = list(answer.prompt_ids)
                choices.append(choice)
        total = add_usage([answer.usage for answer in answers])
        return {**self.head(self.kind), "choices": choices, "usage": usage_body(total).model_dump()}

    def logprobs(self, entries: Sequence[TokenLogprob], length: int) -> dict[str, Any] | None:
        """Log probabilities in the form of text completions; None if there are none.

        length: of the choice's text, in characters.
        """
        return text_logprobs(entries, length) if entries else None

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a delta: one, or none while the engine holds text back.

        The log probability of a token comes with the token's text: as long as the text is held back, a stop
        string may still cut it off.
        """
        sent = self._sent[delta.index] = self._sent.get(delta.index, 0) + len(delta.text)
        held = self._held.setdefault(delta.index, [])
        held += delta.logprobs
        ready = len(held)
        if delta.finish_reason is None:
            ready = next((number for number, entry in enumerate(held) if entry.offset >= sent), ready)
        logprobs = self.logprobs(held[:ready], sent)
        del held[:ready]
        if not (delta.text or logprobs or delta.finish_reason):
            return self.finish_chunks(delta, [])
        choice = self._choice(delta.index, delta.text, delta.finish_reason, logprobs)
        return self.finish_chunks(delta, [{**self.head(self.chunk_kind), "choices": [choice]}])

    def _choice(self, index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def best_choices(answer: Completion, count: int, *, logprobs: bool) -> Completion:
    """Return an answer with the choices whose tokens have the largest mean log probability, best first.

    logprobs: whether the client gets log probabilities.
    """

    def mean(index: int) -> float:
        entries = answer.logprobs[index]
        return sum(entry.logprob or 0.0 for entry in entries) / max(1, len(entries))

    order = sorted(range(len(answer.texts)), key=mean, reverse=True)[:count]
    return replace(
        answer,
        texts=tuple(answer.texts[index] for index in order),
        token_ids=tuple(answer.token_ids[index] for index in order),
        finish_reasons=tuple(answer.finish_reasons[index] for index in order),
        logprobs=tuple(answer.logprobs[index] if logprobs else () for index in order),
        stops=tuple(answer.stops[index] for index in order),
    )


def with_prompt(answer: Completion, text: str, first: str, *, generated: bool) -> Completion:
    """Return an answer whose texts begin with the prompt, and so do its log probabilities if it has any.

    text: of the prompt, as the client sent it. first: text of its first token, which has no log probability.
    generated: whether the text after the prompt was asked for.
    """
    echoed: tuple[TokenLogprob, ...] = ()
    if answer.prompt_logprobs:
        opening = TokenLogprob(answer.prompt_ids[0], first, None)
        echoed = (opening, *(entry for entry in answer.prompt_logprobs[1:] if entry is not None))
    usage = answer.usage if generated else replace(answer.usage, completion=0)
    written = [
        tuple(replace(entry, offset=len(text) + entry.offset) for entry in entries) if generated else ()
        for entries in answer.logprobs
    ]
    return replace(
        answer,
        texts=tuple(text + (part if generated else "") for part in answer.texts),
        logprobs=tuple((*echoed, *entries) for entries in written),
        prompt_logprobs=(),
        usage=usage,
    )
