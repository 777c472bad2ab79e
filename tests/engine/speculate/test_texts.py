"""Continuations of a context in kept texts, compared with a search that reads every place."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import hypothesis.strategies as st
from hypothesis import given

from fovea.engine.speculate.texts import BORDER, CANDIDATES, LONGEST, NOTHING, Continuation, Texts

LARGE = 1 << 24
TEXT = st.lists(st.integers(0, 3), max_size=40)
"""A text of four tokens, in which most pairs occur often."""
SMALLEST = 1088
"""Bytes that hold the text of a few tokens."""


def kept(texts: Texts) -> list[list[int]]:
    """The tokens that are still searched, the latest part first."""
    return [list(part.tokens) for part in texts._parts]


def places(parts: Seq[Seq[int]], context: Seq[int]) -> Iterator[tuple[list[int], int]]:
    """Yield what follows each place of the context's last pair, and the length of the match."""
    for tokens in parts:
        for at in range(len(tokens), 1, -1):
            length = 0
            while length < min(LONGEST, len(context), at) and tokens[at - 1 - length] == context[-1 - length]:
                length += 1
            if length >= 2:
                yield [*tokens[at:], BORDER], length


def search(parts: Seq[Seq[int]], context: Seq[int], most: int) -> Continuation:
    """Find a continuation by looking at all places."""
    found = list(places(parts, context))[:CANDIDATES]
    if not found:
        return NOTHING
    drafts: list[int] = []
    shares: list[float] = []
    alive = [(rest, 2.0**length) for rest, length in found]
    while len(drafts) < most:
        weights: dict[int, float] = {}
        for rest, weight in alive:
            weights[rest[len(drafts)]] = weights.get(rest[len(drafts)], 0) + weight
        best = max(weights, key=lambda token: weights[token])
        if best == BORDER:
            break
        shares.append(weights[best] / sum(weights.values()))
        alive = [(rest, weight) for rest, weight in alive if rest[len(drafts)] == best]
        drafts.append(best)
    return Continuation(drafts, shares, max(length for _, length in found))


def filled(pieces: list[tuple[bool, list[int]]], most_bytes: int = LARGE) -> Texts:
    """Texts from pieces. Each is a part of a text, and whether the text ends with it."""
    texts = Texts(most_bytes)
    for ends, tokens in pieces:
        (texts.add if ends else texts.extend)(tokens)
    return texts


PIECES = st.lists(st.tuples(st.booleans(), TEXT), max_size=8)


@given(pieces=PIECES, context=TEXT, most=st.integers(0, 9))
def test_a_continuation_is_that_of_a_search_of_all_places(
    pieces: list[tuple[bool, list[int]]], context: list[int], most: int
) -> None:
    texts, all_tokens = filled(pieces), [BORDER]
    for ends, tokens in pieces:
        all_tokens += [*tokens, BORDER] if ends else tokens
    assert kept(texts) == [all_tokens]
    assert texts.follow(context, most) == search([all_tokens], context, most)


@given(pieces=PIECES, context=TEXT, most=st.integers(0, 9), room=st.integers(SMALLEST, 4 * SMALLEST))
def test_a_continuation_followed_its_match_in_a_text_that_is_kept(
    pieces: list[tuple[bool, list[int]]], context: list[int], most: int, room: int
) -> None:
    """Also after a half of the texts was forgotten. No draft goes beyond the end of a text."""
    texts = filled(pieces, room)
    tokens, shares, matched = found = texts.follow(context, most)
    assert len(tokens) == len(shares) <= most
    assert BORDER not in tokens
    assert all(0 < share <= 1 for share in shares)
    assert matched in (0, *range(2, LONGEST + 1))
    assert not tokens or matched
    runs = [part[at : at + 2 + len(tokens)] for part in kept(texts) for at in range(len(part))]
    assert not tokens or [*context[-2:], *tokens] in runs
    longest = [*context[-matched:], *tokens[:0]]
    assert not matched or any(
        part[at : at + matched] == longest for part in kept(texts) for at in range(len(part))
    )
    assert found == search(kept(texts), context, most)


@given(
    pieces=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 2**31 - 1), max_size=90)), min_size=1, max_size=12
    ),
    room=st.integers(SMALLEST, 8 * SMALLEST),
)
def test_memory_stays_below_its_bound_and_the_latest_tokens_stay(
    pieces: list[tuple[bool, list[int]]], room: int
) -> None:
    """A text that was longer than the bound was kept as a whole."""
    texts, all_tokens = Texts(room), [BORDER]
    for ends, tokens in pieces:
        (texts.add if ends else texts.extend)(tokens)
        all_tokens += [*tokens, BORDER] if ends else tokens
        assert texts.nbytes <= room
    latest = [token for part in reversed(kept(texts)) for token in part if token != BORDER]
    assert [token for token in all_tokens if token != BORDER][-len(latest) or len(all_tokens) :] == latest
    assert len(kept(texts)) <= 2


def test_nothing_follows_a_context_that_is_shorter_than_a_pair_or_has_a_border() -> None:
    texts = filled([(True, [1, 2, 3])])
    for context in ([], [2], [BORDER, 2], [1, BORDER], [3, 4]):
        assert texts.follow(context, 4) == NOTHING
    assert texts.follow([1, 2], 0) == Continuation([], [], 2)


def test_no_draft_goes_beyond_the_end_of_a_text_or_of_a_forgotten_half() -> None:
    texts = filled([(True, [1, 2, 3]), (True, [4, 5])])
    assert texts.follow([1, 2], 9) == Continuation([3], [1.0], 2)
    assert texts.follow([2, 3], 9) == Continuation([], [], 2)
    texts = filled([(False, [1, 2, 3])])
    assert texts.follow([1, 2], 9) == Continuation([3], [1.0], 2), "the text goes on, but nothing is known"


def test_among_equal_places_the_latest_wins() -> None:
    assert filled([(True, [1, 2, 7]), (True, [1, 2, 8])]).follow([1, 2], 3).tokens == [8]
    assert filled([(True, [1, 2, 8]), (True, [1, 2, 7])]).follow([1, 2], 3).tokens == [7]


def test_only_the_latest_places_count() -> None:
    old, new = (True, [1, 2, 7]), (True, [1, 2, 8])
    texts = filled([old] * 99 + [new] * (CANDIDATES // 2 + 1))
    assert texts.follow([1, 2], 1).tokens == [8]
    assert filled([new] * 99 + [old] * (CANDIDATES // 2 + 1)).follow([1, 2], 1).tokens == [7]


def test_a_longer_match_weighs_more_than_many_shorter_ones() -> None:
    """Two more equal tokens weigh as much as four places without them."""
    texts = filled(
        [(True, [5, 6, 1, 2, 8]), (True, [0, 1, 2, 7]), (True, [0, 1, 2, 7]), (True, [0, 1, 2, 7])]
    )
    found = texts.follow([5, 6, 1, 2], 1)
    assert found == Continuation([8], [16 / (16 + 3 * 4)], 4)
    assert texts.follow([9, 1, 2], 1).tokens == [7]


def test_shares_are_parts_of_the_weight_that_is_left() -> None:
    texts = filled([(True, [1, 2, 3, 4]), (True, [1, 2, 3, 5]), (True, [1, 2, 3, 5]), (True, [1, 2, 9])])
    assert texts.follow([1, 2], 5) == Continuation([3, 5], [3 / 4, 2 / 3], 2)
