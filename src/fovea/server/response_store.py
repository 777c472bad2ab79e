"""Answers of /v1/responses that later requests continue, in memory within a ceiling in bytes.

An answer is kept with the whole conversation before it, images included as they were sent. The least recently
used one makes room for a new one. If clients are separated, an answer belongs to its client alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from fovea.api.content import ChatMessage
from fovea.core.media import Payload
from fovea.media.cache import ByteCache

DAY_S = 86_400.0
OVERHEAD = 600
"""Estimated bytes of a message, and of each of its parts, beside its text."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """One answer.

    owner: client that owns it.
    body: as it was sent.
    messages: the conversation, the answer included, without instructions.
    items: those of the request's `input`.
    """

    owner: str
    body: dict[str, Any]
    messages: tuple[ChatMessage, ...]
    items: tuple[dict[str, Any], ...]


class ResponseStore:
    """The answers of one server, by id. Not thread-safe: for the event loop's thread.

    capacity: ceiling in bytes; 0: nothing is kept.
    """

    def __init__(self, capacity: int, ttl_s: float = 30 * DAY_S) -> None:
        self.cache: ByteCache[str, KeptAnswer] = ByteCache(capacity, ttl_s)
        # No client takes the room of all others. Without keys there is one owner, "".
        self.cache.divide(lambda _, answer: answer.owner, lambda owner: 0.5 if owner else 1.0)

    def put(self, answer: KeptAnswer) -> bool:
        """Keep an answer. Returns whether it had room."""
        size = len(json.dumps(answer.body)) + sum(map(_size, answer.messages))
        return self.cache.put(answer.body["id"], answer, 2 * size)

    def get(self, name: str, owner: str) -> KeptAnswer | None:
        """Return the owner's answer of this id; None: it is not, or no longer, kept."""
        answer = self.cache.find(name)
        found = answer if answer is not None and answer.owner == owner else None
        self.cache.count(hit=found is not None)
        return found

    def drop(self, name: str, owner: str) -> bool:
        """Forget an answer. Returns whether it was kept."""
        return self.get(name, owner) is not None and self.cache.drop(name)

    def stats(self) -> dict[str, float]:
        return self.cache.stats("response_store")


def copy_messages(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return copies of messages. Reading an image empties the original."""
    return tuple(deepcopy(message) if _has_payload(message) else message for message in messages)


def _has_payload(message: ChatMessage) -> bool:
    """Whether a message has an image or video that is emptied when it is read."""
    parts = message.content if isinstance(message.content, list) else ()
    urls = (getattr(part, "image_url", None) or getattr(part, "video_url", None) for part in parts)
    return any(isinstance(getattr(url, "url", None), Payload) for url in urls)


def _size(message: ChatMessage) -> int:
    """About the number of bytes of a message."""
    size = len(message.model_dump_json(exclude={"content"})) + OVERHEAD
    if isinstance(message.content, str):
        return size + len(message.content)
    for part in message.content or ():
        for value in (getattr(part, name, None) for name in ("text", "image_url", "video_url")):
            url = getattr(value, "url", value)
            size += len(url) if isinstance(url, str | Payload) else 0
    return size + OVERHEAD * len(message.content or ())
