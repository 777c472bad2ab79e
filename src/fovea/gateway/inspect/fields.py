"""Checks the fields of a request that would pass by the gateway's own rules, and finds its images and videos.

A gateway forwards fields that it does not know, because engines have many. But some let a client run code in
an engine, connect it to other machines, or see what belongs to other clients. Others decide how much work a
request is, and engines read more forms of them than the gateway counts.

Images and videos are found in the forms of all APIs, without reading them:

    {"type": "image_url", "image_url": {"url": "..."}}      chat; also {"image_url": "..."}
    {"type": "video_url", "video_url": {"url": "..."}}      chat, as vLLM and Fovea have it
    {"type": "input_image", "image_url": "..."}             responses
    {"type": "image", "source": {"type": "url" | "base64"}} messages

Everything in a conversation is searched, at any depth, and an object may hold several of these fields,
because engines disagree about the field that they read. Media that the gateway cannot check are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fovea.api.content import ChatMessage, ImageContent, TextContent, VideoContent
from fovea.api.schema import ChatRequest, CompletionRequest
from fovea.api.unknown import misplaced_picture, picture_in
from fovea.core.errors import InvalidRequest
from fovea.gateway.inspect.body import Body, Prefixed

LONGEST_PATH = 300
"""Characters of a JSON path; a longer one is cut off."""
_URLS = ("image_url", "video_url")
_UNCHECKED = frozenset(
    ("audio_url", "file_url", "image_pil", "image_embeds", "video_embeds", "audio_embeds", "prompt_embeds",
     "multimodal_data", "multi_modal_data")
)  # fmt: skip
"""Fields that engines read as media, and whose addresses or content the gateway does not check."""
_LOADED = ("url", "path", "image", "video", "audio", "base64")
"""Fields of a part of the type image, video or audio that Hugging Face's processors read."""
_NEEDS_URL = frozenset(("image_url", "video_url", "input_image"))
_ARGUMENTS = frozenset(("arguments", "tool_calls", "input", "source", *_URLS))
"""Fields that are not searched further: arguments of calls are data, and media have their own rule."""
_CODE = "it would run code of a client in the engine"
_CONNECT = "it would connect the engine to an address of the client's choice"
_UNSEEN = "the gateway can neither check nor count it"
_OTHERS = "it names what belongs to the engine or to other clients"
REFUSED: Mapping[str, str] = {
    "chat_template": _CODE,
    "logits_processors": _CODE,
    "custom_logit_processor": _CODE,
    "kv_transfer_params": _CONNECT,
    "disaggregated_params": _CONNECT,
    "bootstrap_host": _CONNECT,
    "bootstrap_port": _CONNECT,
    "bootstrap_room": _CONNECT,
    "prompt_embeds": _UNSEEN,
    "input_embeds": _UNSEEN,
    "multi_modal_data": _UNSEEN,
    "image_data": _UNSEEN,
    "video_data": _UNSEEN,
    "audio_data": _UNSEEN,
    "rid": _OTHERS,
    "id_slot": _OTHERS,
    "session_params": _OTHERS,
    "lora_path": _OTHERS,
}
"""Fields of requests that are refused, and why. Each is one of vLLM, SGLang, TensorRT-LLM or llama.cpp."""
_REFUSED = frozenset(REFUSED)
_TEMPLATE = "chat_template_kwargs"
_IN_TEMPLATE = frozenset(("chat_template", "tokenize"))
ANSWERS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")
"""Names of the longest answer in tokens. Engines disagree about which of them counts."""
CHOICES = ("n", "best_of")
MOST_CHOICES = 1024
MOST_TOKENS = (1 << 31) - 1
_TOP = {"chat": frozenset(ChatRequest.model_fields), "completions": frozenset(CompletionRequest.model_fields)}
_IN_MESSAGES = frozenset(ChatMessage.model_fields)
_IN_PARTS = frozenset(
    name for model in (TextContent, ImageContent, VideoContent) for name in model.model_fields
) | {"source", "input_audio"}


def check_fields(value: Mapping[str, Any], api: str) -> None:
    """Check the top-level fields of a request. Raises InvalidRequest, which names the field.

    api: "chat", "completions", "messages" or "responses".
    """
    if not _REFUSED.isdisjoint(value):
        for name, reason in REFUSED.items():
            if value.get(name) is not None:
                raise InvalidRequest(
                    f"{name} is not forwarded: {reason}", param=name, code="unsupported_field"
                )
    held = value.get(_TEMPLATE)
    if isinstance(held, dict) and not _IN_TEMPLATE.isdisjoint(held):
        raise InvalidRequest(
            f"{_TEMPLATE} holds chat_template or tokenize, which are not forwarded: {_CODE}",
            param=_TEMPLATE,
            code="unsupported_field",
        )
    stream = value.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequest("stream is neither true nor false", param="stream")
    for name in ANSWERS:
        _check_count(value, name, 0, MOST_TOKENS, unlimited=None if name == "n_predict" else -1)
    for name in CHOICES:
        _check_count(value, name, 1, MOST_CHOICES)
    if api == "completions":
        prompt = value.get("prompt")
        if any(isinstance(entry, dict) for entry in (prompt if isinstance(prompt, list) else (prompt,))):
            raise InvalidRequest("prompt holds an object; accepted: texts and token ids", param="prompt")


class MediaPart(NamedTuple):
    """One image or video of a request.

    owner, key: `owner[key]` is the URL, or base64 text without the beginning of a data: URL.
    param: JSON path of the URL, for errors.
    is_video: whether it is a video.
    bare: media type of base64 text without the beginning of a data: URL; "": a URL.
    part: the part of the message's content that holds it.
    """

    owner: dict[str, Any]
    key: str
    param: str
    is_video: bool
    bare: str
    part: dict[str, Any]

    @property
    def url(self) -> str:
        """The URL, or base64 text. To be used for bodies of clients only, not for translated ones."""
        return str(self.owner[self.key])


def media_parts(body: dict[str, Any], *, check: bool = True) -> Iterator[MediaPart]:
    """Yield the images and videos of a body in the order of its messages.

    check: whether media in a form that the gateway cannot check raise InvalidRequest.
    """
    for key in ("messages", "input"):
        held = body.get(key)
        if isinstance(held, list | dict):
            yield from _search(held, key, check)


def _search(node: list[Any] | dict[str, Any], path: str, check: bool) -> Iterator[MediaPart]:
    if isinstance(node, list):
        for index, entry in enumerate(node):
            if isinstance(entry, list | dict):
                yield from _search(entry, f"{path}[{index}]"[:LONGEST_PATH], check)
        return
    found = False
    for part in _media(node, path):
        found = True
        yield part
    if check:
        _check(node, path, found)
    for key, entry in node.items():
        if isinstance(entry, list | dict) and key not in _ARGUMENTS:
            yield from _search(entry, f"{path}.{key[:40]}"[:LONGEST_PATH], check)


def _media(entry: dict[str, Any], path: str) -> Iterator[MediaPart]:
    for key in _URLS:
        held = entry.get(key)
        if isinstance(held, dict) and isinstance(held.get("url"), str | Prefixed):
            yield MediaPart(held, "url", f"{path}.{key}.url", key == "video_url", "", entry)
        elif isinstance(held, str):
            yield MediaPart(entry, key, f"{path}.{key}", key == "video_url", "", entry)
    source = entry.get("source")
    if isinstance(source, dict):
        for key in ("url", "data"):
            if isinstance(source.get(key), str):
                bare = str(source.get("media_type") or "image/any") if key == "data" else ""
                yield MediaPart(source, key, f"{path}.source.{key}", False, bare, entry)


def _check(entry: dict[str, Any], path: str, found: bool) -> None:
    """Raise InvalidRequest for media that an engine might load and the gateway has not seen."""
    if not _UNCHECKED.isdisjoint(entry):
        for key in _UNCHECKED:
            if entry.get(key) is not None:
                raise InvalidRequest(
                    f"{path}.{key} cannot be checked, so it is not forwarded; accepted: image_url, "
                    "video_url, input_audio",
                    param=f"{path}.{key}",
                    code="unsupported_media",
                )
    kind = entry.get("type")
    if kind in ("image", "video", "audio"):
        for key in _LOADED:
            if isinstance(entry.get(key), str):
                raise InvalidRequest(
                    f"{path}.{key} is not forwarded in a part of the type {kind!r}; accepted: parts of the "
                    "types image_url and video_url, or a source",
                    param=f"{path}.{key}",
                    code="unsupported_media",
                )
    elif not found and isinstance(kind, str) and kind in _NEEDS_URL and not entry.get("file_id"):
        # Without a URL, vLLM uses the image that any client has sent under the same uuid.
        raise InvalidRequest(f"{path} has no URL of its media", param=path, code="unsupported_media")


def check_pictures(body: Body, api: str) -> None:
    """Raise InvalidRequest for a picture in a field in which no engine looks for one.

    Bodies of other APIs than chat and completions are checked by the backend, or when they are translated.
    """
    if api not in _TOP:
        return
    for path, name, value in _unknown(body.value, _TOP[api]):
        inner = picture_in(value, name, body.head)
        if inner is not None:
            raise misplaced_picture(path + inner, api == "chat")


def _unknown(value: dict[str, Any], known: frozenset[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield path, name and value of the undeclared fields of a body, its messages, and their parts."""
    yield from ((name, name, entry) for name, entry in value.items() if name not in known)
    messages = value.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        at = f"messages[{index}]"
        yield from ((f"{at}.{name}", name, message[name]) for name in message if name not in _IN_MESSAGES)
        parts = message.get("content")
        for place, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict):
                inside = f"{at}.content[{place}]"
                yield from ((f"{inside}.{name}", name, part[name]) for name in part if name not in _IN_PARTS)


def check_priority(value: Mapping[str, Any], tenant: str, least: int) -> None:
    """Raise InvalidRequest if a tenant asks an engine for a more urgent priority than its own.

    least: the tenant's priority; smaller ones are more urgent.
    """
    priority = value.get("priority")
    if priority is None or not tenant:
        return
    if not isinstance(priority, int) or isinstance(priority, bool) or priority < least:
        raise InvalidRequest(
            f"priority is more urgent than that of key {tenant!r}; accepted: whole numbers from {least} on",
            param="priority",
        )


def separate_uuids(body: Body, parts: Iterable[MediaPart], tenant: str) -> None:
    """Replace the names that clients give to images by names that no other tenant can give.

    vLLM keeps images under these names: without this, a tenant could put its image in place of another's.
    """
    for part in parts:
        name = part.part.get("uuid")
        if isinstance(name, str):
            data = f"{len(tenant)}:{tenant}".encode() + bytes(body.raw(name))
            part.part["uuid"] = hashlib.sha256(data).hexdigest()


def _check_count(
    value: Mapping[str, Any], name: str, low: int, high: int, unlimited: int | None = None
) -> None:
    """unlimited: the number that engines read as no limit."""
    count = value.get(name)
    if count is None or count == unlimited:
        return
    if not isinstance(count, int) or isinstance(count, bool) or not low <= count <= high:
        raise InvalidRequest(f"{name} is not a whole number from {low} to {high}", param=name)
