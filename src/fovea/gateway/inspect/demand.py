"""The demand of one request, as routing, limits and queues see it: integers and short texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from fovea.core.errors import InvalidRequest
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.images import RequestImage

BYTES_PER_TOKEN = 4
"""Usual bytes of text per token."""
USUAL_ANSWER = 256
"""Assumed tokens of an answer whose request names no limit."""
PREFIX_BYTES = 16 * 1024
"""Bytes of a conversation's beginning by which it is routed."""
SESSION_FIELDS = ("prompt_cache_key", "conversation", "session_id")


class Demand:
    """The work that a request asks for.

    api: "chat", "completions", "messages" or "responses".
    model: the name in the request.
    stream: whether the answer is wanted as events.
    prompt_tokens: estimated tokens of the prompt's text.
    answer_tokens: tokens that the answer may have, all choices together.
    images: its images and videos.
    visual_tokens: tokens of the images in the model that will answer; set when the model is known.
    session: the name that the client gives to its conversation; "": none.
    prefix: 16 hex digits of the conversation's beginning.
    """

    __slots__ = (
        "answer_tokens",
        "api",
        "images",
        "model",
        "prefix",
        "prompt_tokens",
        "session",
        "stream",
        "visual_tokens",
    )

    def __init__(self, api: str, body: Body, images: list[RequestImage], session: str = "") -> None:
        """session: from a header; a field of the body takes precedence.

        Raises InvalidRequest for a model that is no text.
        """
        value = body.value
        model = value.get("model", "")
        if not isinstance(model, str):
            raise InvalidRequest("model is not a text; accepted: the name of a model", param="model")
        self.api = api
        self.model = "" if body.is_long(model) else model
        self.stream = value.get("stream") is True
        self.images = images
        self.visual_tokens = 0
        urls = {id(image.part.owner) for image in images}
        self.prompt_tokens = sum(_text_bytes(value.get(key), body, urls) for key in _PROMPTS)
        self.prompt_tokens = -(-self.prompt_tokens // BYTES_PER_TOKEN)
        self.answer_tokens = _answer_tokens(value)
        named = (value.get(name) for name in SESSION_FIELDS)
        self.session = next((name for name in named if isinstance(name, str) and name), session)
        self.prefix = _prefix(value, body)

    @property
    def text_tokens(self) -> int:
        """Tokens of text, of the prompt and of the longest possible answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def has_images(self) -> bool:
        """Whether the request has images or videos."""
        return bool(self.images)

    @property
    def has_links(self) -> bool:
        """Whether the backend has to download images or videos itself."""
        return any(image.name for image in self.images)

    def keys(self) -> Iterator[tuple[str, str]]:
        """Yield (reason, key) for routing, the strongest first: image, session, beginning of the text."""
        if self.images:
            yield "image", self.images[0].key
        if self.session:
            yield "session", self.session
        yield "prefix", self.prefix


_PROMPTS = ("messages", "input", "prompt", "system", "instructions", "tools")


def _text_bytes(node: Any, body: Body, urls: set[int]) -> int:
    """Sum the bytes of all texts of a value. urls: ids of the objects that hold URLs of images."""
    if isinstance(node, str):
        return body.length(node)
    if isinstance(node, list):
        return sum(_text_bytes(entry, body, urls) for entry in node)
    if isinstance(node, dict) and id(node) not in urls:
        return sum(_text_bytes(entry, body, urls) for entry in node.values())
    return 0


def _answer_tokens(value: Mapping[str, Any]) -> int:
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    limits = [value[name] for name in names if _is_count(value.get(name))]
    choices = value.get("n")
    each = min(limits, default=USUAL_ANSWER)
    return int(each) * (int(choices) if _is_count(choices) and choices else 1)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _prefix(value: Mapping[str, Any], body: Body) -> str:
    """Hash the beginning of a conversation: everything up to its first user message.

    Later turns begin alike, so they find the backend that has the earlier ones in its cache.
    """
    digest = hashlib.blake2b(digest_size=8)
    room = PREFIX_BYTES
    for text in _opening(value):
        raw = body.raw(text)[:room]
        digest.update(len(raw).to_bytes(4, "big"))
        digest.update(raw)
        room -= len(raw)
        if room <= 0:
            break
    return digest.hexdigest()


def _opening(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a request up to the end of its first user message."""
    for name in ("system", "instructions", "prompt"):
        yield from _texts(value.get(name))
    messages = value.get("messages", value.get("input"))
    if isinstance(messages, str):
        yield messages
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            yield from _texts(message.get("content"))
            if message.get("role") == "user":
                return


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
