"""Decides whether the answer to a request can be cached, and under which key.

A key is a hash of everything in a request that can change its answer. Fields are left out by a list of those
that are known not to matter. A field that is not on this list is part of the key, also one that nobody has
heard of.

The order of top-level fields does not matter. The order inside of them does: a template prints tools in the
order in which they were sent, and an answer follows the order of its schema's properties.

The client's own wishes come in the header Cache-Control.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fovea.gateway.cache.flight import Seat

EXCLUDED = frozenset(
    {
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "speculate",
        "store",
        "stream",
        "stream_options",
        "timeout",
        "user",
    }
)
"""Top-level fields that do not change an answer. A replay follows `stream` and `stream_options` itself."""
MEDIA_MARK = "fovea-media:"
"""The URL of the media item number N (from 0) in a body for `cacheability` is this text and N."""
FORMAT = b"fovea response 1"
"""First part of every key. Another number makes all stored answers unreachable."""
_IDENTITY = re.compile(r"[0-9a-f]{64}")
_MARKS = re.compile(rf'"{MEDIA_MARK}(\d+)"')
# In JSON the quotes inside of a text are escaped, so these match fields, and no text that looks like one.
_URLS = re.compile(rf'url":"(?!{MEDIA_MARK}\d+")')
_FILES = ('file_id":"', 'file_uri":"')
_SERVER_TOOL_FIELDS = ("web_search_options", "search_parameters", "plugins")
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Cacheability(NamedTuple):
    """Whether a request can be cached.

    key: 64 hex digits; None if it cannot.
    reason: why it cannot, as one word for metrics; empty if it can.
    """

    key: str | None
    reason: str = ""


def cacheability(
    body: Mapping[str, Any],
    images: Sequence[str | None],
    *,
    scope: str,
    model_version: str,
    path: str = "/v1/chat/completions",
    asked: bool = False,
) -> Cacheability:
    """Return the key of a request, or the reason why it has none.

    body: the parsed request, in which the URL of every image and video is MEDIA_MARK and its number. It must
        not have had one field twice, because a backend may take the other value.
    images: the identities of these images and videos in the order of their numbers (`content_identity`).
        None, or anything but 64 hex digits, is an item that the gateway has not read.
    scope: requests share answers only within a scope.
    model_version: the name and version of the model that answers.
    path: URL path of the request.
    asked: whether the client wants the answer stored although the model may answer differently every time.
    """
    reason = "" if asked else _randomness(body)
    if reason:
        return Cacheability(None, reason)
    if _wants_running_usage(body):
        return Cacheability(None, "running_usage")
    identities = [image for image in images if image is not None and _IDENTITY.fullmatch(image)]
    if len(identities) != len(images):
        return Cacheability(None, "no_identity")
    try:
        text = _encode({name: body[name] for name in sorted(body) if name not in EXCLUDED})
    except (TypeError, ValueError, RecursionError):
        return Cacheability(None, "unreadable")
    if _URLS.search(text) or any(field in text for field in _FILES):
        return Cacheability(None, "reference")
    if (images or MEDIA_MARK in text) and sorted(int(n) for n in _MARKS.findall(text)) != [
        *range(len(images))
    ]:
        return Cacheability(None, "no_identity")
    return Cacheability(_digest((scope, model_version, path, text, *identities)))


def _randomness(body: Mapping[str, Any]) -> str:
    """Return why equal requests may get different answers; empty if they get the same one."""
    temperature = body.get("temperature")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature != 0:
        return "not_deterministic"
    tools = body.get("tools")
    if isinstance(tools, list) and not all(
        isinstance(tool, dict) and tool.get("type", "function") in ("function", "custom") for tool in tools
    ):
        return "server_tools"
    if any(body.get(name) for name in _SERVER_TOOL_FIELDS):
        return "server_tools"
    return ""


def _wants_running_usage(body: Mapping[str, Any]) -> bool:
    """Whether every chunk of the stream holds the counts so far, which no stored answer knows."""
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("continuous_usage_stats"))


def _digest(parts: Sequence[str]) -> str:
    """Return the SHA-256 of texts as 64 hex digits.

    Each text is preceded by its length in bytes, and all of them by their number, so that two different
    sequences never give the same bytes to the hash.
    """
    framed = [FORMAT, len(parts).to_bytes(8, "big")]
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        framed += (len(data).to_bytes(8, "big"), data)
    return hashlib.sha256(b"".join(framed)).hexdigest()


def permissions(cache_control: str | None) -> tuple[bool, bool]:
    """Return whether a stored answer may be returned, and whether the answer may be stored.

    The client says so in the header Cache-Control (RFC 9111, section 5.2.1). no-store: neither; no-cache, and
    max-age=0: only to be stored. Others have no effect.
    cache_control: value of the header; several headers are joined by commas. None: there is none.
    """
    if not cache_control:
        return True, True
    words = {word.strip().lower().replace(" ", "") for word in cache_control.split(",")}
    if "no-store" in words:
        return False, False
    return not words & {"no-cache", "max-age=0"}, True


@dataclass(slots=True)
class Plan:
    """The decision of the response cache about one request.

    key: key of the answer in a store; empty if the request cannot be cached.
    owner: the tenant.
    reason: why it cannot be cached, one word.
    reads: whether a stored answer may be returned.
    stream, include_usage: the form of the answer that the client asked for.
    choices: number of choices of the answer.
    seat: its place among equal requests, after a lookup that found nothing.
    """

    key: str
    owner: str
    reason: str = ""
    reads: bool = False
    stream: bool = False
    include_usage: bool = False
    choices: int = 1
    seat: Seat | None = None


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a request wants a chunk with token counts at the end of its stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def choices_of(body: Mapping[str, Any]) -> int:
    """Return the number of choices that the answer to a request has: `n` for each prompt."""
    n, prompt = body.get("n"), body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and not all(isinstance(p, int) for p in prompt) else 1
    return (n if isinstance(n, int) else 1) * prompts
