"""Streamed text: its parts add up to the whole, none ends in half a character, no stop string is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, models

from fovea.engine.request.detokenize import REPLACEMENT, TextStream
from tests.support.checkpoints import QWEN_TEMPLATE, tokenizer
from tests.support.thorough import examples

Decode = Callable[[Sequence[int]], str]
WORDS = tokenizer(QWEN_TEMPLATE)
TEXT = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("abc 😀👩‍👧🏽é\u0301漢字한글ไทยनि\u200d🇩🇪\ufffd\n"),
    ),
    max_size=24,
)


def decode(ids: Sequence[int]) -> str:
    return str(WORDS.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def byte_ids(text: str) -> list[int]:
    """One token per byte: the most parts into which a tokenizer could split a character."""
    return [WORDS.convert_tokens_to_ids(char) for b in text.encode() for char in _byte_token(b)]


def _byte_token(value: int) -> str:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return str(bytes_to_unicode()[value])


def parts(ids: Sequence[int], stop: Sequence[str] = (), how: Decode = decode) -> list[str]:
    stream = TextStream(how, stop)
    return [*(stream.push(i) for i in ids), stream.finish()]


@given(TEXT)
def test_parts_are_the_whole_text_and_no_part_ends_in_half_a_character(text: str) -> None:
    for ids in (WORDS.encode(text, add_special_tokens=False), byte_ids(text)):
        shown = parts(ids)
        assert "".join(shown) == decode(ids)
        if REPLACEMENT not in text:
            assert not any(part.endswith(REPLACEMENT) for part in shown)


@settings(max_examples=examples(300))
@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=30))
def test_the_parts_of_any_tokens_add_up_to_their_text(ids: list[int]) -> None:
    """A model may write bytes that are no text.

    Text that was shown stays shown, so the first byte of a character has to wait for the rest of it, however
    many broken bytes came before.
    """
    assert "".join(parts(ids)) == decode(ids)


def test_tokens_without_text_do_not_count_against_an_incomplete_character() -> None:
    """Once, the first byte of an emoji after six skipped tokens was shown as a replacement."""
    special = WORDS.convert_tokens_to_ids("<|im_start|>")
    ids = [*byte_ids("a"), *[special] * 6, *byte_ids("😀b")]
    shown = parts(ids)
    assert not any(REPLACEMENT in part for part in shown)
    assert "".join(shown) == "a😀b"


def test_a_broken_run_of_bytes_does_not_spoil_the_character_after_it() -> None:
    """Once, an emoji after six lone continuation bytes lost its first byte to a replacement character."""
    lone = WORDS.convert_tokens_to_ids(_byte_token(0x9F))
    ids = [lone] * 5 + byte_ids("😀")
    assert "".join(parts(ids)) == decode(ids) == REPLACEMENT * 5 + "😀"


def test_a_long_run_of_broken_bytes_is_shown_in_time_at_constant_cost_per_byte() -> None:
    """A window that only grows would be decoded again as a whole for each byte."""
    lone = WORDS.convert_tokens_to_ids(_byte_token(0x9F))
    longest = 0

    def counting_decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    ids = byte_ids("a") + [lone] * 300 + byte_ids("😀b")
    shown = parts(ids, how=counting_decode)
    assert "".join(shown) == "a" + REPLACEMENT * 300 + "😀b"
    assert sum(map(bool, shown)) > 4
    assert longest < 80


def test_special_tokens_that_are_skipped_leave_no_trace_in_the_window() -> None:
    """With ignore_eos a model may write its end token often. Once, each was decoded with all before it."""
    longest = 0

    def counting_decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    special = WORDS.convert_tokens_to_ids("<|im_end|>")
    assert "".join(parts(byte_ids("ab") + [special] * 200 + byte_ids("é"), how=counting_decode)) == "abé"
    assert longest < 8


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    ids = byte_ids("a€b")
    assert parts(ids) == ["a", "", "", "€", "b", ""]


def test_an_incomplete_character_is_shown_at_the_end() -> None:
    ids = byte_ids("a😀")[:-1]
    assert parts(ids) == ["a", "", "", "", REPLACEMENT]


def sentencepiece() -> Decode:
    """A decoder like Llama's: a text loses its leading space, and <0x..> tokens stand for bytes."""
    words = ["<unk>", "▁", "▁a", "b", "▁b", *(f"<0x{value:02X}>" for value in range(256))]
    raw = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda ids: str(raw.decode(list(ids)))


@given(st.lists(st.sampled_from(["▁", "▁a", "b", "▁b", "é", "😀", "漢"]), max_size=12))
def test_a_tokenizer_that_writes_the_first_word_differently(words: list[str]) -> None:
    """If each token were decoded alone, the space before every word would be lost."""
    plain = {"▁": 1, "▁a": 2, "b": 3, "▁b": 4}
    ids = [i for w in words for i in ([plain[w]] if w in plain else [5 + b for b in w.encode()])]
    shown = parts(ids, how=sentencepiece())
    assert "".join(shown) == sentencepiece()(ids)
    assert not any(REPLACEMENT in part for part in shown)


LETTERS = st.text(st.sampled_from("ab漢😀"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab漢😀"), min_size=1, max_size=5), max_size=4)


@settings(max_examples=examples(200))
@given(LETTERS, STOPS, st.booleans())
def test_the_text_ends_before_the_first_stop_string_and_never_shows_a_part_of_it(
    text: str, stop: list[str], by_bytes: bool
) -> None:
    ids = byte_ids(text) if by_bytes else WORDS.encode(text, add_special_tokens=False)
    stream = TextStream(decode, stop)
    shown = ""
    for token in ids:
        shown += stream.push(token)
        assert not any(one in shown for one in stop)
        if stream.stopped:
            break
    shown += stream.finish()
    # The first token after which the text contains a stop string decides.
    grown = ""
    ends: int | None = None
    for end in range(len(ids) + 1):
        grown = decode(ids[:end]).rstrip(REPLACEMENT)
        found = [at for at in (grown.find(one) for one in stop) if at >= 0]
        if found:
            ends = min(found)
            break
    assert stream.stopped == (ends is not None)
    assert shown == (text if ends is None else text[:ends])


def test_an_incomplete_stop_string_is_shown_at_the_end() -> None:
    assert "".join(parts(byte_ids("say EN"), ["END"])) == "say EN"
    assert "".join(parts(byte_ids("say ENDED"), ["END"])) == "say "


@pytest.mark.parametrize("stop", [["b", "ab"], ["ab", "b"]])
def test_of_two_stop_strings_the_one_that_begins_earlier_cuts(stop: list[str]) -> None:
    whole: Any = WORDS.encode("xab", add_special_tokens=False)
    assert "".join(parts(whole, stop)) in ("x", "xa")
    stream = TextStream(lambda ids: "xab" if ids else "", stop)
    assert (stream.push(0), stream.stopped) == ("x", True)


def test_no_stop_string_counts_before_min_tokens() -> None:
    """min_tokens forbids any earlier end. Text that was shown before it is part of no match."""
    stream = TextStream(decode, ["a"], min_tokens=3)
    shown = ""
    for token in byte_ids("aabaab"):
        shown += stream.push(token)
        if stream.stopped:
            break
    assert (shown, stream.stopped) == ("aab", True)
