"""Stop strings: found as a plain search finds them, at a cost that does not grow with their lengths."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fovea.engine.request.detokenize import StopSearch, TextStream
from tests.support.thorough import examples

LETTERS = st.text("ab", min_size=1, max_size=7)


class NaiveSearch:
    """A search like `StopSearch` that compares the text with every beginning of every string."""

    def __init__(self, stops: list[str]) -> None:
        self.stops, self.held = stops, ""

    def push(self, text: str) -> tuple[str, bool]:
        text = self.held + text
        starts = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if starts:
            return text[: min(starts)], True
        sizes = (size for stop in self.stops for size in range(len(stop)) if text.endswith(stop[:size]))
        keep = max(sizes, default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False


@settings(max_examples=examples(400))
@given(stops=st.lists(LETTERS, max_size=4), parts=st.lists(st.text("abc", max_size=5), max_size=12))
def test_stop_strings_are_found_as_by_a_plain_search(stops: list[str], parts: list[str]) -> None:
    search, naive = StopSearch(stops), NaiveSearch(stops)
    for part in parts:
        found = search.push(part)
        assert found == naive.push(part)
        if found[1]:
            return
    assert search.finish() == naive.held


class CountingText(str):
    """A string that counts the characters that are looked up in it."""

    lookups = 0

    def __getitem__(self, key: object) -> str:
        CountingText.lookups += 1
        return super().__getitem__(key)  # type: ignore[index]


def test_the_cost_per_character_does_not_depend_on_the_length_of_a_stop_string() -> None:
    """16 stop strings of 4,096 characters took 10 ms per token, in the thread that serves all clients.

    The first one made the search hold back thousands of characters. With each token, the others were compared
    with all of these, beginning by beginning.
    """
    lookups = {}
    for length in (64, 4096):
        stops = [CountingText("a" * length + "b"), *(CountingText(c + "b" * length) for c in "bcdefghij")]
        search, CountingText.lookups = StopSearch(stops), 0
        for _ in range(1000):
            search.push("aaaa")
        search.push("c")
        lookups[length] = CountingText.lookups / 4000
    assert lookups[4096] <= lookups[64] + 4
    assert lookups[4096] < 40


def test_tokens_without_text_do_not_make_later_ones_slow() -> None:
    """An answer of end tokens only (ignore_eos) kept them all, and decoded them all for each new one."""
    longest = 0

    def decode(ids: object) -> str:
        nonlocal longest
        assert isinstance(ids, list)
        longest = max(longest, len(ids))
        return "".join("x" for token in ids if token)

    stream = TextStream(decode)
    assert [stream.push(0) for _ in range(5000)] == [""] * 5000
    assert stream.push(1) == "x"
    assert stream.finish() == ""
    assert longest < 100


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_kept_stop_string_ends_the_text_with_itself(cut: int) -> None:
    text = "one two three"
    search = StopSearch(["two", "three"], keep=True)
    first, ended = search.push(text[:cut])
    assert not ended or first == "one two"
    rest = "" if ended else search.push(text[cut:])[0]
    assert first + rest == "one two"
