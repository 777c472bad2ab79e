"""Reads what a backend says it has used, in the forms of all APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fovea.gateway.inspect.demand import BYTES_PER_TOKEN
from fovea.gateway.usage.prices import MOST, Consumption, visual_tokens_of

_TEXTS = frozenset(
    ("arguments", "content", "input", "name", "reasoning", "reasoning_content", "refusal", "text", "thinking")
)
"""Fields of answers with what a model has written, in all APIs. Lists in them hold parts with such fields."""


def consumption_of(usage: Mapping[str, Any] | None, estimate: Consumption) -> Consumption:
    """Return the tokens that a backend reports; what it leaves out is as estimated.

    usage: the object `usage` of an answer; None: there was none, so all of it is estimated.
    estimate: visual tokens by the model's rule, and images; used where the backend tells nothing.
    """
    if usage is None:
        return estimate._replace(estimated=True)
    told = _count(usage, "prompt_tokens", "input_tokens")
    completion = _count(usage, "completion_tokens", "output_tokens")
    if told is None and completion is None:
        return estimate._replace(estimated=True)
    prompt = estimate.prompt_tokens if told is None else told
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    if not isinstance(details, Mapping):
        details = {}
    cached = _count(details, "cached_tokens")
    if cached is None:
        cached = _count(usage, "cache_read_input_tokens") or 0
        if told is not None and "prompt_tokens" not in usage:
            # In Anthropic's API, input_tokens are only those that the cache neither gave nor took.
            prompt += cached + (_count(usage, "cache_creation_input_tokens") or 0)
    visual = visual_tokens_of(details)
    if visual is None:
        visual = min(estimate.visual_tokens, prompt)
    # A reused picture may be counted beside the prompt; never more visual tokens than the prompt has.
    return Consumption(
        prompt_tokens=max(prompt, visual),
        visual_tokens=visual,
        cached_tokens=min(cached, prompt),
        completion_tokens=estimate.completion_tokens if completion is None else completion,
        images=estimate.images,
        estimated=told is None,
    )


def usage_of(body: bytes) -> dict[str, Any] | None:
    """Return the object `usage` of a complete answer; None: it has none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    usage = value.get("usage") if isinstance(value, dict) else None
    return usage if isinstance(usage, dict) else None


def answer_tokens(answer: Mapping[str, Any]) -> int:
    """Estimate the tokens of a complete answer by its texts, for backends that tell no usage."""
    size, left = 0, [answer.get(name) for name in ("choices", "content", "output")]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            for name, entry in node.items():
                if name not in _TEXTS or isinstance(entry, list):
                    left.append(entry if isinstance(entry, dict | list) else None)
                elif entry is not None:
                    text = entry if isinstance(entry, str) else json.dumps(entry)
                    size += len(text.encode("utf-8", "replace"))
    return -(-size // BYTES_PER_TOKEN)


def _count(values: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST:
            return value
    return None
