"""Renders a stored answer as the chunks of a stream.

Each choice comes as a chunk with its role, chunks with its reasoning, content and tool calls, and a chunk
with the reason of its end. Long texts and lists of log probabilities are cut into several chunks, because
some clients refuse long lines. `assemble.Assembler` is the inverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from fovea.api import sse
from fovea.gateway.cache.assemble import CHAT_OBJECT, CHUNK_OBJECT, TEXTS

PIECE = 2048
"""Longest text of a chunk in characters."""
PIECE_ENTRIES = 16
"""Most tokens whose log probabilities one chunk has."""

_HEAD = ("id", "created", "model", "system_fingerprint", "service_tier")
_ELSEWHERE = frozenset({*_HEAD, "object", "choices", "usage"})
_CHOICE = frozenset({"index", "message", "text", "logprobs", "finish_reason"})


def events(body: Mapping[str, Any], *, include_usage: bool) -> list[bytes]:
    """Return the server-sent events of a stored answer, `[DONE]` included.

    body: the complete answer.
    include_usage: whether a chunk with the token counts comes last (`stream_options.include_usage`).
    """
    return [*map(sse.event, chunks(body, include_usage=include_usage)), sse.DONE]


def chunks(body: Mapping[str, Any], *, include_usage: bool) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stored answer. The last one of a choice has the answer's other fields."""
    kind = body.get("object")
    head = {name: body[name] for name in _HEAD if name in body}
    head["object"] = CHUNK_OBJECT if kind == CHAT_OBJECT else kind
    others = {name: value for name, value in body.items() if name not in _ELSEWHERE}
    for number, choice in enumerate(body["choices"], 1):
        pieces = list(_chat(choice) if "message" in choice else _completion(choice))
        for piece in pieces[:-1]:
            yield {**head, "choices": [piece]}
        tail = others if number == len(body["choices"]) else {}
        yield {**head, "choices": [pieces[-1]], **tail}
    if include_usage and body.get("usage") is not None:
        yield {**head, "choices": [], "usage": body["usage"]}


def _chat(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the choices of the chunks of one choice of a chat completion."""
    message, calls = choice["message"], choice["message"].get("tool_calls")
    frame = {"index": choice["index"], "finish_reason": None}
    if "logprobs" in choice:
        frame["logprobs"] = None
    yield {**frame, "delta": _opening(message)}
    for name in ("reasoning_content", "reasoning"):
        for text in _cut(message.get(name)):
            yield {**frame, "delta": {name: text}}
    pieces = zip_longest(_cut(message.get("content")), _cut_logprobs(choice.get("logprobs")))
    for content, logprobs in pieces:
        piece = {**frame, "delta": {} if content is None else {"content": content}}
        if logprobs is not None:
            piece["logprobs"] = logprobs
        yield piece
    for text in _cut(message.get("refusal")):
        yield {**frame, "delta": {"refusal": text}}
    for index, call in enumerate(calls or ()):
        yield {**frame, "delta": {"tool_calls": [{"index": index, **call}]}}
    yield {**frame, "delta": {}, "finish_reason": choice["finish_reason"], **_rest(choice)}


def _opening(message: Mapping[str, Any]) -> dict[str, Any]:
    """The delta of the first chunk: the role, empty fields, and fields that are not cut."""
    opening = {}
    for name, value in message.items():
        if name in TEXTS and value:
            if name == "content":
                opening[name] = ""
        elif name != "tool_calls" or not value:
            opening[name] = value
    return opening


def _completion(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the choices of the chunks of one choice of a text completion."""
    frame = {"index": choice["index"], "finish_reason": None, "logprobs": None}
    pieces = list(zip_longest(_cut(choice["text"]), _cut_logprobs(choice.get("logprobs")))) or [("", None)]
    for number, (text, logprobs) in enumerate(pieces, 1):
        piece = {**frame, "text": text or "", "logprobs": logprobs}
        if number == len(pieces):
            piece |= {"finish_reason": choice["finish_reason"], **_rest(choice)}
        if "logprobs" not in choice:
            del piece["logprobs"]
        yield piece


def _rest(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a choice that other chunks do not have."""
    return {name: value for name, value in choice.items() if name not in _CHOICE}


def _cut(text: str | None) -> list[str]:
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)] if text else []


def _cut_logprobs(logprobs: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Cut the lists of log probabilities, whose entries belong to the same tokens."""
    if logprobs is None:
        return []
    longest = max((len(value) for value in logprobs.values() if isinstance(value, list)), default=0)
    return [
        {
            name: value[start : start + PIECE_ENTRIES] if isinstance(value, list) else value
            for name, value in logprobs.items()
        }
        for start in range(0, max(longest, 1), PIECE_ENTRIES)
    ]
