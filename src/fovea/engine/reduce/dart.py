"""DART (arXiv 2502.11494): keep a few strong tokens and those least similar to them; drop duplicates.

The pivots are the strongest tokens of the image, then those of the words, strongest first. Each pivot in turn
selects the same number of the remaining tokens, those with the lowest cosine to it. The paper keeps pivots +
8 * floor(...) tokens and states no order of the pivots. Here the order is fixed, and the first pivots select
one token more if the number does not divide, so that the count is exact.

There are three variants:

dart_k      the paper's. It works on the hidden states and keys after the decoder's second layer. The kept
            tokens are then computed again from the first layer on, so that the KV of every layer holds the
            same tokens.
dart        works on the decoder's input embeddings and needs no layer.
dart_query  like dart, with pivots among the user's words as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fovea.engine.reduce.base import ReducedTokens, ReductionInput, pick_tokens, top_indices, unit_rows

PIVOTS = 4
"""Number of pivots of the image, and of the words."""


def choose(image: ReductionInput, keep: int) -> ReducedTokens:
    return pick_tokens(image, choose_distinct(image.embeds, strength(image.embeds), image.embeds[:0], keep))


def choose_with_query(image: ReductionInput, keep: int) -> ReducedTokens:
    words = image.embeds[:0] if image.query is None else image.query
    pivots = words[top_indices(strength(words), PIVOTS)]
    return pick_tokens(image, choose_distinct(image.embeds, strength(image.embeds), pivots, keep))


def choose_in_decoder(image: ReductionInput, keep: int) -> ReducedTokens:
    """The variant `dart_k`. The words are the tokens after the image."""
    probe = image.probe
    assert probe is not None
    end = probe.start + image.count
    norms = strength(probe.keys)
    words = probe.hidden[end:][top_indices(norms[end:], PIVOTS)]
    rows = slice(probe.start, end)
    return pick_tokens(image, choose_distinct(probe.hidden[rows], norms[rows], words, keep))


def strength(rows: Tensor) -> Tensor:
    """L1 norms (N,) of rows (N, ...)."""
    return rows.float().flatten(1).abs().sum(1)


def choose_distinct(states: Tensor, norms: Tensor, words: Tensor, keep: int) -> Tensor:
    """Choose `keep` of N tokens and return their numbers.

    states: (N, D), compared by cosine.
    norms: (N,), strength of the tokens.
    words: (P, D), pivots in addition to those of the image.
    """
    first = top_indices(norms, min(PIVOTS, keep))
    unit = unit_rows(states)
    cosines = torch.cat((unit[first], unit_rows(words))) @ unit.T
    cosines[:, first] = torch.inf
    choices, pivots, left = [first], len(cosines), keep - len(first)
    for number, row in enumerate(cosines):
        quota = left // pivots + (number < left % pivots)
        choice = row.argsort(stable=True)[:quota]
        cosines[:, choice] = torch.inf
        choices.append(choice)
    return torch.cat(choices)
