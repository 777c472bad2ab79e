"""Finds the images and videos of a request body, in the forms of all APIs, without reading them.

{"type": "image_url", "image_url": {"url": "..."}}      chat; also {"image_url": "..."}
{"type": "video_url", "video_url": {"url": "..."}}      chat, as vLLM and Fovea have it
{"type": "input_image", "image_url": "..."}             responses
{"type": "image", "source": {"type": "url" | "base64"}} messages

Everything in a conversation is searched, at any depth, and an object may hold several of these fields,
because engines disagree about the field that they read. Media that the gateway cannot check are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fovea.core.errors import InvalidRequest
from fovea.gateway.translate.prefixed import Prefixed

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
