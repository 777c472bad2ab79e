"""Perplexity: the cut of a text into prompts, and the sum over their tokens."""

from __future__ import annotations

import math

import pytest

from fovea.core.types import TokenLogprob
from fovea.evaluation.perplexity import Perplexity, pieces


def test_pieces_begin_with_the_tokens_that_all_prompts_begin_with() -> None:
    assert list(pieces([5, 6, 7, 8, 9], [1], 3)) == [(1, 5, 6), (1, 7, 8), (1, 9)]
    assert list(pieces([5, 6, 7, 8, 9], [], 2)) == [(5, 6), (7, 8)], "9 alone is not predicted"
    assert list(pieces([], [1], 3)) == []


def test_a_model_that_guesses_has_the_perplexity_of_its_choices() -> None:
    """Among 8 equal tokens each takes 3 bits; a first token has no log-probability."""
    guess = TokenLogprob(0, "a", -math.log(8))
    found = Perplexity.of([(None, guess, guess), (None, guess)], 9)
    assert found.tokens == 3
    assert found.perplexity == pytest.approx(8)
    assert found.bits_per_byte == pytest.approx(1)
