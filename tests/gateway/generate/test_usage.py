"""Consumption: what a backend tells counts, and the rest is estimated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.gateway.usage.prices import Consumption, consumption_of, usage_of

ESTIMATE = Consumption(prompt_tokens=50, visual_tokens=20, completion_tokens=8, images=2)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 100, "completion_tokens": 7}, Consumption(100, 20, 0, 7, 2)),
        ({"input_tokens": 100, "output_tokens": 7}, Consumption(100, 20, 0, 7, 2)),
        (
            {
                "prompt_tokens": 100,
                "completion_tokens": 0,
                "prompt_tokens_details": {"cached_tokens": 30, "image_tokens": 64},
            },
            Consumption(100, 64, 30, 0, 2),
        ),
        (
            {"input_tokens": 100, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 300}},
            Consumption(100, 20, 100, 1, 2),
        ),
        ({"input_tokens": 9, "output_tokens": 1, "cache_read_input_tokens": 4}, Consumption(13, 13, 4, 1, 2)),
        (
            {"input_tokens": 1, "cache_creation_input_tokens": 9, "cache_read_input_tokens": 90},
            Consumption(100, 20, 90, 8, 2),
        ),
        ({"prompt_tokens": 100}, Consumption(100, 20, 0, 8, 2)),
        ({"output_tokens": 3}, Consumption(50, 20, 0, 3, 2, estimated=True)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"image_tokens": 9}}, Consumption(9, 9, 0, 8, 2)),
        ({"prompt_tokens": 100, "prompt_tokens_details": "x"}, Consumption(100, 20, 0, 8, 2)),
        (None, ESTIMATE._replace(estimated=True)),
        ({}, ESTIMATE._replace(estimated=True)),
        ({"prompt_tokens": -1, "completion_tokens": True}, ESTIMATE._replace(estimated=True)),
        ({"prompt_tokens": "9", "completion_tokens": 1.5}, ESTIMATE._replace(estimated=True)),
    ],
)
def test_what_is_told_counts(usage: Any, expected: Consumption) -> None:
    assert consumption_of(usage, ESTIMATE) == expected


COUNTS = st.none() | st.integers(-5, 500) | st.booleans() | st.text(max_size=2)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("prompt_tokens", "input_tokens", "completion_tokens", "output_tokens"), COUNTS),
            "cache_read_input_tokens": COUNTS,
            "prompt_tokens_details": st.none()
            | st.lists(COUNTS, max_size=1)
            | st.dictionaries(st.sampled_from(["cached_tokens", "image_tokens"]), COUNTS),
        },
    )
)
def test_counts_are_never_negative_nor_more_than_the_prompt(usage: dict[str, Any]) -> None:
    found = consumption_of(usage, ESTIMATE)
    assert 0 <= found.visual_tokens <= found.prompt_tokens
    assert 0 <= found.cached_tokens <= found.prompt_tokens
    assert found.completion_tokens >= 0
    assert found.images == ESTIMATE.images


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"usage":5}', b'{"usage":null}', b"\xff"])
def test_answers_without_usage(body: bytes) -> None:
    assert usage_of(body) is None


def test_usage_of_an_answer() -> None:
    assert usage_of(b'{"id":"x","usage":{"prompt_tokens":3}}') == {"prompt_tokens": 3}
