"""The decision of the response cache about one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fovea.gateway.cache.flight import Seat


class Plan:
    """A decision about one request.

    key: key of the answer in a store; empty if the request cannot be cached.
    reason: why it cannot, one word.
    owner: the tenant.
    reads: whether a stored answer may be returned.
    stream, include_usage: the form of the answer that the client asked for.
    choices: number of choices of the answer.
    seat: its place among equal requests, after a lookup that found nothing.
    """

    __slots__ = ("choices", "include_usage", "key", "owner", "reads", "reason", "seat", "stream")

    def __init__(
        self,
        *,
        key: str,
        owner: str,
        reason: str = "",
        reads: bool = False,
        stream: bool = False,
        include_usage: bool = False,
        choices: int = 1,
    ) -> None:
        self.key = key
        self.owner = owner
        self.reason = reason
        self.reads = reads
        self.stream = stream
        self.include_usage = include_usage
        self.choices = choices
        self.seat: Seat | None = None


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a request wants a chunk with token counts at the end of its stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def choices_of(body: Mapping[str, Any]) -> int:
    """Return the number of choices that the answer to a request has: `n` for each prompt."""
    n, prompt = body.get("n"), body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and not all(isinstance(p, int) for p in prompt) else 1
    return (n if isinstance(n, int) else 1) * prompts
