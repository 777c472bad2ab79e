"""A stored answer: one complete JSON body, from which both forms of an answer are made.

A complete replay is the stored bytes. A replay as a stream is rendered from them (`replay.py`). Both have the
`id` and `created` of the answer that the model gave: they name the generation, which an operator can find in
the backend's log. The header `x-fovea-cache: hit` and `age` tell that this answer was stored.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FINISHED = frozenset({"stop", "length", "tool_calls", "function_call"})
"""The reasons for the end of a successful answer. An answer that ended for another one is not stored."""

_HEAD = struct.Struct(">4s?d")
_MAGIC = b"fvr1"


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
