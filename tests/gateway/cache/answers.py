"""Answers for tests of the response cache: random ones, and the bytes of their streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import hypothesis.strategies as st

from fovea.gateway.cache.answers import Entry
from fovea.gateway.cache.cache import entry_of

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30) | st.just("é 中 \U0001f600 \r\n" * 800)
LATER = st.none() | st.integers(0, 9) | st.just({"a": [1]})
TOKEN = st.fixed_dictionaries({"token": TEXT, "logprob": st.floats(-9, 0), "top_logprobs": st.just([])})
USAGE = st.fixed_dictionaries(
    {"prompt_tokens": st.integers(0, 99), "completion_tokens": st.integers(0, 99), "total_tokens": st.just(5)}
)
CALL = st.fixed_dictionaries(
    {
        "id": st.uuids().map(str),
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g"]), "arguments": TEXT}),
    }
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | TEXT},
    optional={
        "refusal": st.none() | TEXT,
        "reasoning": TEXT,
        "reasoning_content": st.none() | TEXT,
        "tool_calls": st.none() | st.lists(CALL, max_size=3),
        "new_field": LATER,
    },
)
FINISH = st.sampled_from(["stop", "length", "tool_calls"])
CHOICE = st.fixed_dictionaries(
    {"message": MESSAGE, "finish_reason": FINISH},
    optional={
        "logprobs": st.none()
        | st.fixed_dictionaries({"content": st.none() | st.lists(TOKEN, max_size=40), "refusal": st.none()}),
        "stop_reason": LATER,
        "token_ids": st.lists(st.integers(0, 9), max_size=5),
    },
)
TEXT_CHOICE = st.fixed_dictionaries(
    {"text": TEXT, "finish_reason": st.sampled_from(["stop", "length"])},
    optional={
        "logprobs": st.none()
        | st.integers(0, 40).map(lambda n: {"tokens": ["x"] * n, "text_offset": list(range(n))}),
        "stop_reason": LATER,
    },
)


def _body(kind: str, choices: list[dict[str, Any]], head: dict[str, Any]) -> dict[str, Any]:
    numbered = [{"index": index, **choice} for index, choice in enumerate(choices)]
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "m", **head, "choices": numbered}


HEAD = st.fixed_dictionaries(
    {},
    optional={
        "usage": USAGE,
        "system_fingerprint": st.none() | TEXT,
        "fovea": LATER,
        "prompt_token_ids": LATER,
    },
)
BODIES = st.builds(
    _body, st.just("chat.completion"), st.lists(CHOICE, min_size=1, max_size=3), HEAD
) | st.builds(_body, st.just("text_completion"), st.lists(TEXT_CHOICE, min_size=1, max_size=3), HEAD)


def answer(content: str = "A cat.", **head: Any) -> dict[str, Any]:
    """A complete answer with token counts."""
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    choice = {"message": message, "finish_reason": "stop", "logprobs": None}
    return _body("chat.completion", [choice], {"usage": usage, **head})


def sent(*payloads: Any) -> bytes:
    """The bytes of events, one for each payload; a text is sent as it is."""
    lines = [p if isinstance(p, str) else json.dumps(p) for p in payloads]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def recorded(
    data: bytes, *, stream: bool = True, choices: int = 1, pieces: int = 1, limit: int = 1 << 20
) -> Entry:
    """Return the answer whose bytes arrive in so many pieces. Raises Unstorable."""
    step = max(1, -(-len(data) // pieces))
    parts = [data[start : start + step] for start in range(0, len(data), step)]
    return asyncio.run(entry_of(parts, stream=stream, choices=choices, stored=5.0, limit=limit))
