"""Text as it comes: the pieces are the whole, no piece ends in half a character, no stop string is ever seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, models

from fovea.engine.request.detokenize import REPLACEMENT, TextStream
from tests.support.checkpoints import QWEN_TEMPLATE, tokenizer

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
    """One token per byte, the most halves that a tokenizer could make of a character."""
    return [WORDS.convert_tokens_to_ids(piece) for b in text.encode() for piece in _byte_token(b)]


def _byte_token(value: int) -> str:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return str(bytes_to_unicode()[value])


def pieces(ids: Sequence[int], stop: Sequence[str] = (), how: Decode = decode) -> list[str]:
    stream = TextStream(how, stop)
    return [*(stream.push(i) for i in ids), stream.finish()]


@given(TEXT)
def test_pieces_are_the_whole_text_and_no_piece_ends_in_half_a_character(text: str) -> None:
    for ids in (WORDS.encode(text, add_special_tokens=False), byte_ids(text)):
        shown = pieces(ids)
        assert "".join(shown) == decode(ids)
        if REPLACEMENT not in text:
            assert not any(piece.endswith(REPLACEMENT) for piece in shown)


@settings(max_examples=300)
@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=30))
def test_any_tokens_at_all_add_up_to_their_text(ids: list[int]) -> None:
    """A model is free to write bytes that are no text. What was shown may never be taken back, so a byte that waits
    for its character must wait however many broken ones came before it."""
    assert "".join(pieces(ids)) == decode(ids)


def test_tokens_without_text_do_not_use_up_the_patience_for_a_character() -> None:
    """Six skipped special tokens and then the first byte of an emoji: the half was shown, for six tokens had come."""
    special = WORDS.convert_tokens_to_ids("<|im_start|>")
    ids = [*byte_ids("a"), *[special] * 6, *byte_ids("😀b")]
    shown = pieces(ids)
    assert not any(REPLACEMENT in piece for piece in shown)
    assert "".join(shown) == "a😀b"


def test_a_broken_run_of_bytes_does_not_spoil_the_character_after_it() -> None:
    """Six lone continuation bytes and then an emoji, byte for byte: the emoji's first byte was shown as a replacement."""
    lone = WORDS.convert_tokens_to_ids(_byte_token(0x9F))
    ids = [lone] * 5 + byte_ids("😀")
    assert "".join(pieces(ids)) == decode(ids) == REPLACEMENT * 5 + "😀"


def test_a_long_run_of_broken_bytes_is_shown_in_time_and_costs_no_more_at_its_end_than_at_its_start() -> None:
    """A window that only grows would decode the whole run again for each of its bytes."""
    lone = WORDS.convert_tokens_to_ids(_byte_token(0x9F))
    longest = 0

    def watched(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    ids = byte_ids("a") + [lone] * 300 + byte_ids("😀b")
    shown = pieces(ids, how=watched)
    assert "".join(shown) == "a" + REPLACEMENT * 300 + "😀b"
    assert sum(map(bool, shown)) > 4
    assert longest < 80


def test_special_tokens_that_are_skipped_leave_no_trace_in_the_window() -> None:
    """With ignore_eos a model may write its end token a thousand times; each one was decoded with all before it."""
    longest = 0

    def watched(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    special = WORDS.convert_tokens_to_ids("<|im_end|>")
    assert "".join(pieces(byte_ids("ab") + [special] * 200 + byte_ids("é"), how=watched)) == "abé"
    assert longest < 8


def test_text_comes_as_soon_as_it_is_certain() -> None:
    ids = byte_ids("a€b")
    assert pieces(ids) == ["a", "", "", "€", "b", ""]


def test_what_never_became_a_character_is_shown_at_the_end() -> None:
    ids = byte_ids("a😀")[:-1]
    assert pieces(ids) == ["a", "", "", "", REPLACEMENT]


def sentencepiece() -> Decode:
    """Llama's way: a leading space that the start of a text loses, and <0x..> tokens for bytes."""
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
    """Decoding each token alone would lose every space in front of a word."""
    plain = {"▁": 1, "▁a": 2, "b": 3, "▁b": 4}
    ids = [i for w in words for i in ([plain[w]] if w in plain else [5 + b for b in w.encode()])]
    shown = pieces(ids, how=sentencepiece())
    assert "".join(shown) == sentencepiece()(ids)
    assert not any(REPLACEMENT in piece for piece in shown)


LETTERS = st.text(st.sampled_from("ab漢😀"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab漢😀"), min_size=1, max_size=5), max_size=4)


@settings(max_examples=200)
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
    # As tokens came: the first moment at which the text so far holds a stop string decides.
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


def test_text_that_only_began_a_stop_string_is_shown_in_the_end() -> None:
    assert "".join(pieces(byte_ids("say EN"), ["END"])) == "say EN"
    assert "".join(pieces(byte_ids("say ENDED"), ["END"])) == "say "


@pytest.mark.parametrize("stop", [["b", "ab"], ["ab", "b"]])
def test_of_two_stop_strings_the_one_that_begins_earlier_cuts(stop: list[str]) -> None:
    whole: Any = WORDS.encode("xab", add_special_tokens=False)
    assert "".join(pieces(whole, stop)) in ("x", "xa")
    stream = TextStream(lambda ids: "xab" if ids else "", stop)
    assert (stream.push(0), stream.stopped) == ("x", True)


def test_no_stop_string_counts_before_min_tokens() -> None:
    """min_tokens means no end before, whatever would have ended the text; what is shown till then is no match."""
    stream = TextStream(decode, ["a"], min_tokens=3)
    shown = ""
    for token in byte_ids("aabaab"):
        shown += stream.push(token)
        if stream.stopped:
            break
    assert (shown, stream.stopped) == ("aab", True)
