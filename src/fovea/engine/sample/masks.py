"""Applies the masks of grammars to logits: one operation on the device for all rows of a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fovea.engine.grammar.guide import Masks
from fovea.engine.sample.batch import row_index


class RowMask:
    """The mask of one row.

    row: the logits of the row as the model computed them, (vocabulary,).
    """

    def __init__(self, masks: Masks, index: int, forbidden: Tensor, row: Tensor) -> None:
        self.row = row
        self._masks = masks
        self._index = index
        self._forbidden = forbidden

    def allows(self, token: int) -> bool:
        return self._masks.allows(self._index, token)

    def apply(self, row: Tensor) -> Tensor:
        """Return the row with -inf for forbidden tokens.

        If the request's own parameters (min_tokens, allowed_token_ids, bad_words) exclude all tokens that the
        grammar allows, these tokens are equally likely: the grammar decides.
        """
        masked = row.masked_fill(self._forbidden, -math.inf)
        if float(masked.max()) > -math.inf:
            return masked
        return torch.zeros_like(row).masked_fill_(self._forbidden, -math.inf)


def apply_masks(masks: Masks | None, logits: Tensor) -> dict[int, RowMask]:
    """Set the forbidden tokens of `logits` to -inf, in place, and return the masks by row.

    Rows without a grammar have none.
    """
    if masks is None:
        return {}
    forbidden = ~torch.from_numpy(masks.allowed(logits.shape[1])).to(logits.device)
    index = row_index(masks.rows, logits.device)
    before = logits[index]
    logits[index] = before.masked_fill(forbidden, -math.inf)
    return {row: RowMask(masks, i, forbidden[i], before[i]) for i, row in enumerate(masks.rows)}
