"""Guides that look at proposed drafts: what the grammar allows stays the same, whatever was proposed."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fovea.core.constraints import AnswerFormat
from fovea.engine.grammar.compiler import Grammar
from fovea.engine.grammar.definition import compile_format
from fovea.engine.grammar.guide import Guide
from fovea.engine.grammar.trial import byte_vocabulary
from fovea.engine.sequence import NO_DRAFTS, Drafts
from tests.support.thorough import examples

MARK = tuple(b"|>")
PATTERNS = ("(yes|no), (sir|madam)!", "[ab]{1,9}c[ab]{2}", "(abc){2,4}d?")


def guide(pattern: str, after: tuple[int, ...] = ()) -> Guide:
    return Grammar(compile_format(AnswerFormat.regex(pattern), byte_vocabulary())).guide(after)


def written(pattern: str, seed: int) -> list[int]:
    """A text of a pattern, drawn at random."""
    place, dice, text = guide(pattern), Random(seed), list[int]()
    while not place.ended:
        place.read(text)
        if place.ended:
            break
        mask = np.unpackbits(place._mask().view(np.uint8), bitorder="little")[:256]
        text.append(dice.choice(np.flatnonzero(mask).tolist()))
    return text


def proposal(dice: Random, rest: list[int]) -> Drafts:
    """A proposal that is right at its beginning, and may be wrong later."""
    tokens = rest[: dice.randint(0, 8)]
    if tokens and dice.random() < 0.5:
        tokens[dice.randrange(len(tokens))] = dice.choice([*b"abcxyz, |>"])
    chances = sorted((dice.uniform(0.1, 1) for _ in tokens), reverse=True)
    return Drafts(tokens, chances, 0, "prompt")


@pytest.mark.parametrize("thinks", [False, True])
@settings(max_examples=examples(60))
@given(pattern=st.sampled_from(PATTERNS), seed=st.integers(0, 999), most=st.sampled_from([0, 2, 16]))
def test_proposed_drafts_change_neither_masks_nor_the_end(
    thinks: bool, pattern: str, seed: int, most: int
) -> None:
    dice = Random(seed)
    thought = [*dice.choices(b"ab |", k=dice.randint(0, 6)), *MARK] if thinks else []
    after = MARK if thinks else ()
    answer = thought + written(pattern, seed)
    plain, proposed = guide(pattern, after), guide(pattern, after)
    known = 0
    while known < len(answer):
        new = answer[known : known + dice.randint(1, 4)]
        expected = plain.look(answer[:known], new, None, most)
        offer = proposal(dice, answer[known + len(new) :])
        found = proposed.look(answer[:known], new, None, most, offer)
        known += len(new)
        assert (found.length, found.complete) == (expected.length, expected.complete)
        if found.complete is not None:
            assert found.drafts == NO_DRAFTS
            return
        tokens, chances, forced, _ = found.drafts
        assert len(tokens) == len(chances) >= forced == expected.drafts.forced
        assert list(tokens[:forced]) == list(expected.drafts.tokens)
        assert list(chances[:forced]) == [1.0] * forced
        assert list(chances) == sorted(chances, reverse=True)
        if proposed.waits:
            assert not found.masks
            assert MARK[-1] not in tokens
            assert list(tokens) == list(offer.tokens[: len(tokens)])
            continue
        assert len(found.masks) == len(tokens) + 1
        for count, mask in enumerate(found.masks):
            fresh = guide(pattern)
            fresh.read([*answer[len(thought) : known], *tokens[:count]])
            assert np.array_equal(mask, fresh._mask()), "the mask of another place"


def test_a_proposal_that_begins_as_the_forced_tokens_goes_on_behind_them() -> None:
    place = guide("(yes|no), (sir|madam)!")
    chances = [0.8, 0.4, 0.4, 0.2]
    found = place.look([], list(b"no"), None, 16, Drafts(list(b", s!"), chances, 0, "prompt"))
    assert found.drafts == Drafts(list(b", s"), [1.0, 1.0, 1.0], 2, "prompt")
    found = place.look(list(b"no"), list(b", "), None, 16, Drafts(list(b"mad"), [0.5, 0.4, 0.3], 0, "hints"))
    assert found.drafts == Drafts(list(b"mad"), [0.5, 0.4, 0.3], 0, "hints")
    found = place.look(list(b"no, "), list(b"s"), None, 16, Drafts(list(b"up"), [0.5, 0.4], 0, "hints"))
    assert found.drafts == Drafts.certain(list(b"ir!"))
