"""Finds the images and videos of a request body, in the forms of all APIs, without reading them.

{"type": "image_url", "image_url": {"url": "..."}}      chat; also {"image_url": "..."}
{"type": "video_url", "video_url": {"url": "..."}}      chat, as vLLM and Fovea have it
{"type": "input_image", "image_url": "..."}             responses
{"type": "image", "source": {"type": "url" | "base64"}} messages

Backends choose by `type` or by the fields that they find, each in its own way. So every field of an entry
that may hold an image counts, and an entry that holds one is searched for nested content all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fovea.gateway.translate.prefixed import Prefixed

MAX_DEPTH = 8
"""Levels of nested content that are searched: a message, its content, a tool's result, its content."""
_LISTS = ("messages", "input", "content", "output")


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


def media_parts(body: dict[str, Any]) -> Iterator[MediaPart]:
    """Yield the images and videos of a body in the order of its messages."""
    for key in ("messages", "input"):
        if key in body:
            yield from _search(body[key], key, MAX_DEPTH)


def _search(node: Any, path: str, depth: int) -> Iterator[MediaPart]:
    if isinstance(node, list):
        for index, entry in enumerate(node):
            if isinstance(entry, dict):
                yield from _entry(entry, f"{path}[{index}]", depth)


def _entry(entry: dict[str, Any], path: str, depth: int) -> Iterator[MediaPart]:
    yield from _media(entry, path)
    if depth:
        for key in _LISTS:
            if key in entry:
                yield from _search(entry[key], f"{path}.{key}", depth - 1)


def _media(entry: dict[str, Any], path: str) -> Iterator[MediaPart]:
    for key in ("image_url", "video_url"):
        held = entry.get(key)
        if isinstance(held, dict) and isinstance(held.get("url"), str | Prefixed):
            yield MediaPart(held, "url", f"{path}.{key}.url", key == "video_url", "", entry)
        if isinstance(held, str):
            yield MediaPart(entry, key, f"{path}.{key}", key == "video_url", "", entry)
    source = entry.get("source")
    if isinstance(source, dict):
        for key in ("url", "data"):
            if isinstance(source.get(key), str):
                bare = str(source.get("media_type") or "image/any") if key == "data" else ""
                yield MediaPart(source, key, f"{path}.source.{key}", False, bare, entry)
