"""Bodies of answers: complete ones, and chunks of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fovea.api.convert import extension_body, usage_body
from fovea.core.errors import EngineError, FoveaError
from fovea.core.types import Completion, Delta, TokenLogprob, Usage

LONGEST_MESSAGE = 500
LONGEST_PARAM = 200
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

    def __init__(self, model: str, fingerprint: str | None = None) -> None:
        """fingerprint: names what the answer depends on beside the request."""
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.fingerprint = fingerprint
        self._started: set[int] = set()
        self.model = model
        self.created = int(time.time())

    def complete(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The body of a complete answer. answers: exactly one."""
        [answer] = answers
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": self.logprobs(logprobs),
                "finish_reason": reason,
            }
            for index, (text, reason, logprobs) in enumerate(
                zip(answer.texts, answer.finish_reasons, answer.logprobs, strict=True)
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
        """The chunks of a delta. There is none with text while the engine holds text back.

        The first chunk of a choice holds its role. The last chunk of an answer holds the `fovea` field.
        """
        chunks = []
        if delta.index not in self._started:
            self._started.add(delta.index)
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}, None, None))
        if delta.text or delta.logprobs or delta.finish_reason:
            content = {"content": delta.text} if delta.text or delta.logprobs else {}
            chunks.append(
                self._chunk(delta.index, content, self.logprobs(delta.logprobs), delta.finish_reason)
            )
        if delta.timings is not None:
            chunks[-1]["fovea"] = extension_body(delta.timings, delta.images)
        return chunks

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk with the token counts, which ends a stream if the client requested it."""
        return {
            **self._head("chat.completion.chunk"),
            "choices": [],
            "usage": usage_body(usage).model_dump(),
        }

    def _chunk(self, index: int, delta: dict[str, str], logprobs: Any, reason: str | None) -> dict[str, Any]:
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


class CompletionBodies:
    """Bodies of one text completion. With several prompts, a choice has the index prompt * n + choice."""

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

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk with the token counts, which ends a stream if the client requested it."""
        return {**self._head(), "choices": [], "usage": usage_body(usage).model_dump()}

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
