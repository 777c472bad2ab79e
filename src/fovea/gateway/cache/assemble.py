"""Puts the chunks of a stream together to the complete answer that the same model would have given.

A rule for each field says how its values in several chunks become one: texts and lists are appended, names
and numbers must not change. A field that no rule knows is kept if it has one value. If it has several, nobody
knows what they mean together, and the answer is not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fovea.gateway.cache.entry import Unstorable

TEXTS = ("content", "refusal", "reasoning", "reasoning_content")
"""Fields of a message whose pieces are appended."""
CHUNK_OBJECT, CHAT_OBJECT = "chat.completion.chunk", "chat.completion"
_OWN = frozenset({"choices", "usage", "object", "created", "obfuscation"})


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
    """Set a field that has one value in the whole stream. Null is no value.

    Raises Unstorable for a second value.
    """
    known = fields.get(name)
    if known is None:
        fields[name] = value
    elif value is not None and value != known:
        raise Unstorable("ambiguous")
