"""DART (arXiv 2502.11494): keep a few strong tokens, and beside them what is least like them; duplicates go.

Pivots are the strongest tokens of the image, then of the words, strongest first. Each in turn takes the same number of the
tokens that are left, those of the lowest cosine to it. The paper keeps pivots + 8 * floor(...) tokens and visits pivots in no
stated order; here the first pivots take one more where the number does not divide, so that the count is exact, and the order
is fixed.

The paper works after the decoder's second layer, on its hidden states and keys (`dart_k`: chosen by those, and the kept tokens
are computed anew from the first layer, so that every layer's KV holds the same tokens). On the decoder's input embeddings it
needs no layer at all (`dart`), and with pivots among the user's words as well it is `dart_query`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fovea.engine.reduce.base import Reduced, Seen, highest, picked, unit_rows

PIVOTS = 4
"""Of the image, and as many of the words."""


def choose(seen: Seen, keep: int) -> Reduced:
    return picked(seen, distinct(seen.embeds, strength(seen.embeds), seen.embeds[:0], keep))


def choose_with_query(seen: Seen, keep: int) -> Reduced:
    words = seen.embeds[:0] if seen.query is None else seen.query
    pivots = words[highest(strength(words), PIVOTS)]
    return picked(seen, distinct(seen.embeds, strength(seen.embeds), pivots, keep))


def choose_in_decoder(seen: Seen, keep: int) -> Reduced:
    """Words are what stands after the image."""
    probe = seen.probe
    assert probe is not None
    end = probe.start + seen.count
    norms = strength(probe.keys)
    words = probe.hidden[end:][highest(norms[end:], PIVOTS)]
    image = slice(probe.start, end)
    return picked(seen, distinct(probe.hidden[image], norms[image], words, keep))


def strength(rows: Tensor) -> Tensor:
    """L1 norms (N,) of rows (N, ...)."""
    return rows.float().flatten(1).abs().sum(1)


def distinct(states: Tensor, norms: Tensor, words: Tensor, keep: int) -> Tensor:
    """Numbers of `keep` of the N tokens. states (N, D), norms (N,); words (P, D): pivots beside those of the image."""
    first = highest(norms, min(PIVOTS, keep))
    unit = unit_rows(states)
    likeness = torch.cat((unit[first], unit_rows(words))) @ unit.T
    likeness[:, first] = torch.inf
    chosen, pivots, left = [first], len(likeness), keep - len(first)
    for number, row in enumerate(likeness):
        room = left // pivots + (number < left % pivots)
        taken = row.argsort(stable=True)[:room]
        likeness[:, taken] = torch.inf
        chosen.append(taken)
    return torch.cat(chosen)
