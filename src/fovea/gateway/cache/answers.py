"""A stored answer: one complete JSON body, made from a stream if need be, and turned into a stream again.

A complete replay is the stored bytes. A replay as a stream is rendered from them: each choice comes as a
chunk with its role, chunks with its reasoning, content and tool calls, and a chunk with the reason of its
end. Long texts and lists of log probabilities are cut into several chunks, because some clients refuse long
lines. Both have the `id` and `created` of the answer that the model gave: they name the generation, which an
operator can find in the backend's log.

The chunks of a stream are put together to the complete answer that the same model would have given. A rule
for each field says how its values in several chunks become one: texts and lists are appended, names and
numbers must not change. A field that no rule knows is kept if it has one value. If it has several, nobody
knows what they mean together, and the answer is not stored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from fovea.api import sse

FINISHED = frozenset({"stop", "length", "tool_calls", "function_call"})
"""The reasons for the end of a successful answer. An answer that ended for another one is not stored."""
_HEAD = struct.Struct(">4s?d")
_MAGIC = b"fvr1"
TEXTS = ("content", "refusal", "reasoning", "reasoning_content")
"""Fields of a message whose pieces are appended."""
CHUNK_OBJECT, CHAT_OBJECT = "chat.completion.chunk", "chat.completion"
_OWN = frozenset({"choices", "usage", "object", "created", "obfuscation"})
PIECE = 2048
"""Longest text of a chunk in characters."""
PIECE_ENTRIES = 16
"""Most tokens whose log probabilities one chunk has."""
_HEAD_FIELDS = ("id", "created", "model", "system_fingerprint", "service_tier")
_ELSEWHERE = frozenset({*_HEAD_FIELDS, "object", "choices", "usage"})
_CHOICE_FIELDS = frozenset({"index", "message", "text", "logprobs", "finish_reason"})


class Unstorable(ValueError):
    """An answer that is not stored. Its text is the reason, one word for metrics."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored answer.

    body: the complete answer as JSON in UTF-8.
    stored: time at which it was stored, in seconds since 1970.
    has_usage: whether it has token counts. A stream has none if nobody asked for them.
    """

    body: bytes
    stored: float
    has_usage: bool

    def pack(self) -> bytes:
        """Return the entry as bytes, for a store."""
        return _HEAD.pack(_MAGIC, self.has_usage, self.stored) + self.body


def unpack(data: bytes) -> Entry | None:
    """Return the entry that `pack` wrote; None for bytes of another format."""
    if len(data) <= _HEAD.size:
        return None
    magic, has_usage, stored = _HEAD.unpack_from(data)
    return Entry(data[_HEAD.size :], stored, has_usage) if magic == _MAGIC else None


def check_answer(body: Any, choices: int) -> Mapping[str, Any]:
    """Return a complete answer if it can be stored.

    body: the parsed JSON of the answer.
    choices: number of choices that the request asked for.

    Raises Unstorable unless it is successful, and each choice is there and has ended.
    """
    if not isinstance(body, dict):
        raise Unstorable("not_an_answer")
    if body.get("error") is not None or body.get("object") == "error":
        raise Unstorable("error")
    found = body.get("choices")
    if not isinstance(found, list) or not all(isinstance(choice, dict) for choice in found):
        raise Unstorable("not_an_answer")
    if [choice.get("index") for choice in found] != list(range(choices)):
        raise Unstorable("missing_choice")
    for choice in found:
        reason = choice.get("finish_reason")
        if not isinstance(reason, str) or reason not in FINISHED:
            raise Unstorable("not_finished")
        if not (isinstance(choice.get("message"), dict) or isinstance(choice.get("text"), str)):
            raise Unstorable("not_an_answer")
    return body


class Assembler:
    """An answer that grows chunk by chunk."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}
        self._usage: Any = None

    def add(self, chunk: Any) -> None:
        """Add the JSON of one event. Raises Unstorable for an error, and for what cannot be put together."""
        if not isinstance(chunk, dict) or chunk.get("error") is not None or chunk.get("object") == "error":
            raise Unstorable("error")
        pieces = chunk.get("choices")
        if not isinstance(pieces, list):
            raise Unstorable("not_an_answer")
        for name, value in chunk.items():
            if name not in _OWN:
                _set_once(self._head, name, value)
        self._head.setdefault("created", chunk.get("created"))
        self._head.setdefault("object", CHAT_OBJECT if _is_chat(chunk, pieces) else "text_completion")
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        for piece in pieces:
            index = piece.get("index") if isinstance(piece, dict) else None
            if type(index) is not int:
                raise Unstorable("not_an_answer")
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = _Choice(index)
            choice.add(piece)

    def body(self) -> dict[str, Any]:
        """Return the complete answer. Without token counts in the stream, it has no field `usage`."""
        body = {**self._head, "choices": [self._choices[index].body() for index in sorted(self._choices)]}
        if self._usage is not None:
            body["usage"] = self._usage
        return body


class _Choice:
    """One choice of the answer."""

    __slots__ = ("_fields", "_lists", "_logprobs", "_message", "_text")

    def __init__(self, index: int) -> None:
        self._fields: dict[str, Any] = {"index": index}
        self._message: _Message | None = None
        self._text: list[str] | None = None
        self._lists: dict[str, list[Any]] = {}
        self._logprobs: dict[str, Any] | None = None

    def add(self, piece: Mapping[str, Any]) -> None:
        """Add the choice's part of one chunk."""
        for name, value in piece.items():
            if name == "delta":
                if self._message is None:
                    self._message = _Message()
                self._message.add(value)
            elif name == "text":
                self._text = [] if self._text is None else self._text
                self._text.append(_text(value))
            elif name == "logprobs":
                self._fields.setdefault(name, None)
                self._add_logprobs(value)
            elif name == "token_ids" and isinstance(value, list):
                self._lists.setdefault(name, []).extend(value)
            else:
                _set_once(self._fields, name, value)

    def body(self) -> dict[str, Any]:
        """The choice of the complete answer."""
        body = {**self._fields, **self._lists}
        if self._logprobs is not None:
            body["logprobs"] = self._logprobs
        if self._message is not None:
            body["message"] = self._message.body()
        if self._text is not None:
            body["text"] = "".join(self._text)
        return body

    def _add_logprobs(self, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, dict):
            raise Unstorable("ambiguous")
        if self._logprobs is None:
            self._logprobs = {}
        for name, entries in value.items():
            known = self._logprobs.get(name)
            if isinstance(known, list) and isinstance(entries, list):
                known.extend(entries)
            elif isinstance(entries, list) and known is None:
                self._logprobs[name] = list(entries)
            else:
                _set_once(self._logprobs, name, entries)


class _Message:
    """The message of a choice."""

    __slots__ = ("_calls", "_fields", "_texts")

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {"role": "assistant"}
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, _Call] = {}

    def add(self, delta: Any) -> None:
        """Add the message's part of one chunk."""
        if not isinstance(delta, dict):
            raise Unstorable("ambiguous")
        for name, value in delta.items():
            if name == "tool_calls" and value:
                self._fields.setdefault(name, None)
                self._add_calls(value)
            elif name in TEXTS and value is not None:
                self._texts.setdefault(name, []).append(_text(value))
            elif name == "tool_calls" and self._calls:
                continue
            else:
                _set_once(self._fields, name, value)

    def body(self) -> dict[str, Any]:
        """The message of the complete answer."""
        body = {**self._fields, **{name: "".join(pieces) for name, pieces in self._texts.items()}}
        if self._calls:
            if sorted(self._calls) != list(range(len(self._calls))):
                raise Unstorable("ambiguous")
            body["tool_calls"] = [self._calls[index].body() for index in range(len(self._calls))]
        return body

    def _add_calls(self, pieces: Any) -> None:
        for piece in pieces if isinstance(pieces, list) else [None]:
            if not isinstance(piece, dict) or type(index := piece.get("index")) is not int:
                raise Unstorable("ambiguous")
            call = self._calls.get(index)
            if call is None:
                call = self._calls[index] = _Call()
            call.add(piece)


class _Call:
    """One tool call of a message."""

    __slots__ = ("_arguments", "_fields", "_function")

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._function: dict[str, Any] = {}
        self._arguments: list[str] = []

    def add(self, piece: Mapping[str, Any]) -> None:
        """Add the call's part of one chunk."""
        for name, value in piece.items():
            if name == "function" and isinstance(value, dict):
                self._add_function(value)
            elif name != "index" and value != "":
                _set_once(self._fields, name, value)

    def body(self) -> dict[str, Any]:
        """The call of the complete answer."""
        if self._function or self._arguments:
            return {**self._fields, "function": {**self._function, "arguments": "".join(self._arguments)}}
        return self._fields

    def _add_function(self, function: Mapping[str, Any]) -> None:
        for name, value in function.items():
            if name == "arguments":
                if value is not None:
                    self._arguments.append(_text(value))
            elif value != "":
                _set_once(self._function, name, value)


def _is_chat(chunk: Mapping[str, Any], pieces: list[Any]) -> bool:
    return chunk.get("object") == CHUNK_OBJECT or any(
        isinstance(piece, dict) and "delta" in piece for piece in pieces
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unstorable("ambiguous")
    return value


def _set_once(fields: dict[str, Any], name: str, value: Any) -> None:
    """Set a field that has one value in the whole stream. Null is not a value.

    Raises Unstorable for a second value.
    """
    known = fields.get(name)
    if known is None:
        fields[name] = value
    elif value is not None and value != known:
        raise Unstorable("ambiguous")


def events(body: Mapping[str, Any], *, include_usage: bool) -> list[bytes]:
    """Return the server-sent events of a stored answer, `[DONE]` included.

    body: the complete answer.
    include_usage: whether a chunk with the token counts comes last (`stream_options.include_usage`).
    """
    return [*map(sse.event, chunks(body, include_usage=include_usage)), sse.DONE]


def chunks(body: Mapping[str, Any], *, include_usage: bool) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stored answer. The last one of a choice has the answer's other fields."""
    kind = body.get("object")
    head = {name: body[name] for name in _HEAD_FIELDS if name in body}
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
    return {name: value for name, value in choice.items() if name not in _CHOICE_FIELDS}


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
