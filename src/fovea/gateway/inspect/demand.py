"""The work that a request asks for, as routing, limits and queues see it: numbers of tokens, and short texts.

Tokens of text are estimated by bytes, those of images by the rule of the model that will answer.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fovea.core.errors import FoveaError, InvalidRequest
from fovea.core.media import DETAILS
from fovea.core.protocols import VisualTokenRule
from fovea.gateway.config import ModelConfig
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.fields import ANSWERS, CHOICES, MOST_TOKENS
from fovea.gateway.inspect.images import RequestImage
from fovea.gateway.usage.prices import BYTES_PER_TOKEN
from fovea.media.token_rules import estimate_rule

USUAL_ANSWER = 256
"""Assumed tokens of an answer whose request names no limit."""
PREFIX_BYTES = 16 * 1024
"""Bytes of a conversation's beginning by which it is routed."""
LONGEST_SESSION = 256
"""Characters of a session's name; a longer one is known by its hash."""
SHORT_ANSWER = 16
"""Tokens of an answer of /v1/completions whose request names no limit, by OpenAI and most engines."""
OWN_LIMITS = {
    "chat": ("max_tokens", "max_completion_tokens"),
    "completions": ("max_tokens",),
    "messages": ("max_tokens",),
    "responses": ("max_output_tokens",),
}
"""Names of the longest answer that engines read, by API."""
SESSION_FIELDS = ("prompt_cache_key", "conversation", "session_id")
_PROMPTS = ("messages", "input", "prompt", "system", "instructions", "suffix")
_SCHEMAS = (
    "tools", "functions", "documents", "chat_template_kwargs", "response_format", "text", "guided_json",
    "structured_outputs", "json_schema",
)  # fmt: skip
"""Fields whose names of fields are part of the prompt, too."""
UNKNOWN_SIDE = 1024
"""Assumed side in pixels of an image behind a URL, whose size is not known."""
VIDEO_TOKENS = 2048
"""Assumed tokens of a video: which frames a model takes is not known from the outside."""
log = logging.getLogger("fovea.gateway")
FindRule = Callable[[str], VisualTokenRule | None]
"""Returns the rule of a model's name or of a checkpoint's folder; None: it is not known."""


class Demand:
    """The work that a request asks for.

    stream: whether the answer is wanted as events.
    prompt_tokens: estimated tokens of the prompt's text.
    answer_tokens: tokens that the answer may have, all choices together.
    images: its images and videos.
    visual_tokens: tokens of the images in the model that will answer; set when the model is known.
    session: the name that the client gives to its conversation; "": none.
    prefix: 16 hex digits of the conversation's beginning.
    """

    def __init__(self, body: Body, images: list[RequestImage], session: str = "") -> None:
        """session: from a header; a field of the body takes precedence.

        Raises InvalidRequest for a model that is not text, and for answers that are too long together.

        The fields have been checked by `check_fields`.
        """
        value = body.value
        if not isinstance(value.get("model", ""), str):
            raise InvalidRequest("model is not a text; accepted: the name of a model", param="model")
        self.stream = value.get("stream") is True
        self.images = images
        self.visual_tokens = 0
        self.prompt_tokens = -(-_prompt_bytes(value, body, images) // BYTES_PER_TOKEN)
        self.answer_tokens = _answer_tokens(value)
        named = (value.get(name) for name in SESSION_FIELDS)
        self.session = next((body.text(name) for name in named if isinstance(name, str) and name), session)
        if len(self.session) > LONGEST_SESSION:
            data = self.session.encode("utf-8", "surrogatepass")
            self.session = hashlib.blake2b(data, digest_size=16).hexdigest()
        self.prefix = _prefix(value, body)

    def with_answer_limit(self, value: dict[str, Any], api: str, usual: int, most: float) -> dict[str, Any]:
        """Return a body that names its longest answer, so that no engine generates more than is reserved.

        value: of the body as it is sent. api: as which it is sent.
        usual: most tokens of an answer that names no limit.
        most: tokens of text that the request may have; 0: any number.
        """
        if any(value.get(name) not in (None, -1) for name in OWN_LIMITS[api]):
            return value
        value = {name: given for name, given in value.items() if name not in OWN_LIMITS[api]}
        limit = _limit(value)
        if limit is None:
            limit = min(usual, SHORT_ANSWER) if api == "completions" else usual
            if most:
                limit = min(limit, int(most - self.prompt_tokens) // _answers(value))
            least = value.get("min_tokens")
            limit = max(1, limit, least if type(least) is int and least <= MOST_TOKENS else 1)
        limited = {**value, OWN_LIMITS[api][0]: limit}
        self.answer_tokens = _answer_tokens(limited)
        return limited

    @property
    def text_tokens(self) -> int:
        """Tokens of text, of the prompt and of the longest possible answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def has_images(self) -> bool:
        """Whether the request has images or videos."""
        return bool(self.images)

    @property
    def identity(self) -> str:
        """The identity of its first image; "": it has none, or only an engine can tell."""
        return self.images[0].identity if self.images else ""

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


def _prompt_bytes(value: Mapping[str, Any], body: Body, images: list[RequestImage]) -> int:
    """Sum the bytes of all texts of a prompt, without the URLs of its images.

    Only a long URL is known by its placeholder. A short one may be a text elsewhere, so it counts once less.
    """
    urls = [image.part.url for image in images]
    long = frozenset(url for url in urls if body.is_long(url))
    size = sum(_text_bytes(value[key], body, long) for key in _PROMPTS if key in value)
    size += sum(_text_bytes(value[key], body, long, True) for key in _SCHEMAS if key in value)
    short = (image.part.url for image in images if not image.part.bare)
    return max(0, size - sum(body.length(url) for url in short if url not in long))


def _text_bytes(node: Any, body: Body, urls: frozenset[str], names: bool = False) -> int:
    """Sum the bytes of all texts of a value. A list of token ids counts as the text of so many tokens.

    urls: placeholders of the URLs of images, which do not count.
    names: whether the names of fields count.
    """
    if isinstance(node, str):
        return 0 if node in urls else body.length(node)
    if isinstance(node, list):
        if node and isinstance(node[0], int):
            return len(node) * BYTES_PER_TOKEN
        return sum(_text_bytes(entry, body, urls, names) for entry in node)
    if isinstance(node, dict):
        held = sum(_text_bytes(entry, body, urls, names) for entry in node.values())
        return held + sum(map(body.length, node)) if names else held
    return 0


def _answer_tokens(value: Mapping[str, Any]) -> int:
    """Return the tokens of all answers. The largest of several limits counts: an engine may read that one."""
    limit = _limit(value)
    total = (USUAL_ANSWER if limit is None else limit) * _answers(value)
    if total > MOST_TOKENS:
        raise InvalidRequest(
            f"the answers may have {total} tokens together; accepted: at most {MOST_TOKENS}",
            param="max_tokens",
        )
    return total


def _limit(value: Mapping[str, Any]) -> int | None:
    limits = [int(value[name]) for name in ANSWERS if value.get(name) is not None]
    return max((limit for limit in limits if limit >= 0), default=None)


def _answers(value: Mapping[str, Any]) -> int:
    """The number of answers of a request, including those that are not returned because others are better."""
    return max(int(value.get(name) or 1) for name in CHOICES) * _prompts(value.get("prompt"))


def _prompts(prompt: Any) -> int:
    """The number of prompts of a request for completions: each is answered."""
    if not isinstance(prompt, list) or all(isinstance(entry, int) for entry in prompt):
        return 1
    return len(prompt)


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


class VisualCounter:
    """Counts visual tokens by the rules of models. A model without a known rule is estimated by area."""

    def __init__(self, find: FindRule) -> None:
        self._find = find
        self._estimate = estimate_rule()
        self._rules: dict[str, VisualTokenRule] = {}

    def rule(self, model: ModelConfig) -> VisualTokenRule:
        """Return the rule of a model, or the estimate by area, with a warning, if no rule is known."""
        name = model.visual_rule or model.served or model.name
        if name not in self._rules:
            found = self._find(name)
            if found is None:
                log.warning(
                    "model %s: no rule for visual tokens is known, so they are estimated by area; "
                    "set visual_rule",
                    model.name,
                )
            self._rules[name] = found or self._estimate
        return self._rules[name]

    def count(self, model: ModelConfig, images: Sequence[RequestImage]) -> int:
        """Return the visual tokens of some images together. Raises InvalidRequest and InvalidImage."""
        if not images:
            return 0
        rule, number = self.rule(model), len(images)
        return sum(
            VIDEO_TOKENS if image.is_video else _tokens(rule, image, number, index)
            for index, image in enumerate(images)
        )


def _tokens(rule: VisualTokenRule, image: RequestImage, number: int, index: int) -> int:
    own: dict[str, Any] = image.part.owner if image.part.key == "url" else image.part.part
    detail = "high" if own.get("detail") == "original" else own.get("detail")
    try:
        return rule.tokens(
            image.width or UNKNOWN_SIDE,
            image.height or UNKNOWN_SIDE,
            detail=detail if detail in DETAILS else "auto",
            images=number,
            min_pixels=_pixels(own.get("min_pixels")),
            max_pixels=_pixels(own.get("max_pixels")),
        )
    except FoveaError as error:
        error.message = f"image {index}: {error.message}"
        error.param = image.part.param
        raise


def _pixels(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
