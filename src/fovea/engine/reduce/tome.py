"""ToMe (arXiv 2210.09461) on the encoder's output: neighbours in meaning are merged until as many are left as wanted.

A round deals the tokens out in turn to two sides, gives each of the first its nearest of the second, by cosine, and merges the
nearest of these pairs; a merged token is the mean of all that went into it and stands where the second of the pair stood.
The paper merges within the encoder, which saves its time as well and works on its keys; here it is the embeddings that are
compared, and a round merges at most an eighth of the tokens, so that a pair is not merged only because its turn has come.

DyMU (arXiv 2504.17040) merges whatever is nearer than a threshold instead: how many tokens that leaves says how much there is
in an image, `complexity`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fovea.engine.reduce.base import Reduced, Seen, averaged, highest, unit_rows

MERGED_AT_ONCE = 1 / 8


def choose(seen: Seen, keep: int) -> Reduced:
    sums, count = seen.embeds.float(), seen.count
    index = members = torch.arange(count, device=sums.device)
    while count > keep:
        likeness, nearest = pairs(sums)
        merged = highest(likeness, min(count - keep, max(1, int(count * MERGED_AT_ONCE))))
        into, stays = joined(count, merged, nearest)
        # The sum of what went into a token points where its mean does, and a cosine does not see its length.
        sums = sums.new_zeros((int(stays.sum()), sums.shape[1])).index_add_(0, into, sums)
        index, members, count = index[stays], into[members], len(sums)
    return averaged(seen, index, members)


def complexity(embeds: Tensor, threshold: float) -> int:
    """How many tokens are left of embeds (N, D) when everything of a cosine above `threshold` is merged, round by round."""
    sums = embeds.float()
    while len(sums) > 1:
        likeness, nearest = pairs(sums)
        merged = (likeness > threshold).nonzero()[:, 0]
        if not len(merged):
            break
        into, stays = joined(len(sums), merged, nearest)
        sums = sums.new_zeros((int(stays.sum()), sums.shape[1])).index_add_(0, into, sums)
    return len(sums)


def pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """For each of the first side (rows 0, 2, 4...) the cosine with its nearest of the second (1, 3, 5...), and which it is."""
    unit = unit_rows(rows)
    likeness, nearest = (unit[::2] @ unit[1::2].T).max(1)
    return likeness, nearest


def joined(count: int, merged: Tensor, nearest: Tensor) -> tuple[Tensor, Tensor]:
    """merged: which of the first side go. Returns the new row of each of `count` rows, and (count,) bool which stay."""
    into = torch.arange(count, device=merged.device)
    stays = torch.ones_like(into, dtype=torch.bool)
    stays[2 * merged] = False
    rows = stays.cumsum(0) - 1
    into[2 * merged] = 2 * nearest[merged] + 1
    return rows[into], stays
