"""Parts of sealing: the search for control tokens, and the copy of a tokenizer without their names."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.core.errors import CheckpointError
from fovea.engine.request.control_tokens import rename_tokens, search_pattern
from tests.support.thorough import is_thorough


def test_merges_and_vocabularies_lose_the_names_of_control_tokens() -> None:
    content: dict[str, Any] = {
        "added_tokens": [{"id": 3, "content": "<s>", "normalized": True}],
        "model": {
            "vocab": {"<": 0, "s>": 1, "a": 2, "<s>": 3},
            "merges": [["<", "s>"], "< a"],
            "unk_token": "<s>",
        },
    }
    rename_tokens(content, {"<s>": "?"})
    assert content["added_tokens"] == [{"id": 3, "content": "?", "normalized": False}]
    assert content["model"] == {
        "vocab": {"<": 0, "s>": 1, "a": 2, "?": 3},
        "merges": ["< a"],
        "unk_token": "?",
    }


WORDS = st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=12)


@given(words=WORDS, text=st.text("ab<|", max_size=30))
def test_the_pattern_finds_the_leftmost_longest_words(words: list[str], text: str) -> None:
    expected, at = [], 0
    while at < len(text):
        found = max((word for word in words if text.startswith(word, at)), key=len, default="")
        expected += [found] * bool(found)
        at += len(found) or 1
    assert search_pattern(words).findall(text) == expected


def test_thousands_of_nested_tokens_are_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="cannot be searched for"):
        search_pattern("a" * size for size in range(1, 1200 if is_thorough() else 800))
