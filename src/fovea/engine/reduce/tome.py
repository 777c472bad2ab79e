"""ToMe (arXiv 2210.09461) on the encoder's output: merge similar tokens until the wanted number is left.

Every round divides the tokens alternately into two sides. Each token of the first side is paired with the
nearest token of the second, by cosine, and the nearest of these pairs are merged. A merged token is the mean
of all tokens that went into it, and has the place of the pair's second token.

The paper merges inside the encoder, by the keys of its attention, which also saves the encoder's time. Here
the embeddings are compared. A round merges at most an eighth of the tokens, so that no dissimilar pairs are
merged early.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fovea.engine.reduce.base import ReducedTokens, ReductionInput, merge_tokens, top_indices, unit_rows

MERGE_SHARE = 1 / 8
"""Largest share of the tokens that one round merges."""


def choose(image: ReductionInput, keep: int) -> ReducedTokens:
    sums, count = image.embeds.float(), image.count
    index = members = torch.arange(count, device=sums.device)
    while count > keep:
        cosines, nearest = nearest_pairs(sums)
        removed = top_indices(cosines, min(count - keep, max(1, int(count * MERGE_SHARE))))
        new_rows, stays = merge_pairs(count, removed, nearest)
        # Sums replace means here: they have the same direction, and a cosine does not depend on the length.
        sums = sums.new_zeros((int(stays.sum()), sums.shape[1])).index_add_(0, new_rows, sums)
        index, members, count = index[stays], new_rows[members], len(sums)
    return merge_tokens(image, index, members)


def nearest_pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Pair each row of the first side (0, 2, 4...) with the nearest row of the second side (1, 3, 5...).

    Returns the cosine of each pair, and the number of its second row within the second side.
    """
    unit = unit_rows(rows)
    cosines, nearest = (unit[::2] @ unit[1::2].T).max(1)
    return cosines, nearest


def merge_pairs(count: int, removed: Tensor, nearest: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber `count` rows after some of the first side are merged into their nearest of the second.

    removed: numbers, within the first side, of the rows that are merged away.
    nearest: as from `nearest_pairs`.

    Returns the new row of each old row, (count,), and a mask of the rows that stay, (count,) bool.
    """
    targets = torch.arange(count, device=removed.device)
    stays = torch.ones_like(targets, dtype=torch.bool)
    stays[2 * removed] = False
    rows = stays.cumsum(0) - 1
    targets[2 * removed] = 2 * nearest[removed] + 1
    return rows[targets], stays
