"""Amounts that a request takes of its tenant's limits, and the consumption that a backend reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MOST = 1 << 40
"""A larger number of tokens is taken for none: no account could hold it."""


class Amounts(NamedTuple):
    """Amounts that limits and budgets count.

    requests: number of requests.
    text_tokens: tokens of text, of prompts and answers together.
    visual_tokens: tokens of images and videos.
    cost: money, in millionths of the currency of the price table.
    """

    requests: int = 0
    text_tokens: int = 0
    visual_tokens: int = 0
    cost: int = 0


class Consumption(NamedTuple):
    """The tokens of one answered request, as its backend reports them or as the gateway estimates them.

    prompt_tokens: tokens of the prompt, visual ones included.
    visual_tokens: tokens of images and videos among them.
    cached_tokens: tokens of the prompt that the backend did not compute again.
    completion_tokens: tokens of all choices.
    images: images and videos of the request.
    estimated: whether the backend reported nothing, so that these are estimates.
    """

    prompt_tokens: int = 0
    visual_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    images: int = 0
    estimated: bool = False

    @property
    def text_tokens(self) -> int:
        """Tokens of text, of prompt and answer."""
        return max(0, self.prompt_tokens - self.visual_tokens) + self.completion_tokens


def visual_tokens_of(details: Mapping[str, Any]) -> int | None:
    """Return the visual tokens that a backend's `prompt_tokens_details` tell; None: they tell none.

    Fovea tells one number, vLLM one for each kind of media.
    """
    kinds = details.get("multimodal_tokens")
    if isinstance(kinds, Mapping):
        counts = [kinds.get("image"), kinds.get("video")]
    else:
        counts = [details.get("image_tokens")]
    known = [count for count in counts if type(count) is int and 0 <= count < MOST]
    return sum(known) if known else None
