"""What a request does to its logits before a token is drawn: bias, penalties, floors and filters.

Every function takes one request's float32 row (vocabulary,) and returns one; nothing is shared between requests, so a
neighbour in the batch can not change an answer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fovea.core.sampling import SamplingParams

NUCLEUS_GUESS = 1024
TINY = 1e-30


def adjust(
    row: Tensor, params: SamplingParams, prompt: list[int], output: list[int], forbidden: frozenset[int]
) -> Tensor:
    """Bias and penalties in OpenAI's order, then ids that may not come yet (min_tokens)."""
    row = row.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}), device=row.device)
        values = row[seen]
        row[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.unique(torch.tensor(output, device=row.device), return_counts=True)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(row.dtype)
    if forbidden:
        row[torch.tensor(sorted(forbidden), device=row.device)] = float("-inf")
    return row


def needs_adjusting(params: SamplingParams, forbidden: frozenset[int]) -> bool:
    return bool(
        params.logit_bias
        or forbidden
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def distribution(row: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Candidates (ids) and their probabilities, after temperature, top-k, top-p and min-p.

    Most likely first where there is a filter; by id, unsorted, where there is none: sorting a vocabulary costs more
    than drawing from it.
    """
    # From the best down, so that no temperature above zero, however small in float32, makes an infinity of it.
    row = (row - row.max()) / max(params.temperature, TINY)
    total = torch.logsumexp(row, 0)
    count = row.shape[0]
    if params.top_k:
        values, ids = torch.topk(row, min(params.top_k, count))
        total = torch.logsumexp(values, 0)
    elif params.top_p < 1.0:
        values, ids = torch.topk(row, min(NUCLEUS_GUESS, count))
        if float((values - total).exp().sum()) < params.top_p:
            values, ids = torch.sort(row, descending=True)
    elif params.min_p > 0.0:
        ids = torch.nonzero(row >= row.max() + math.log(params.min_p)).squeeze(1)
        values, order = row[ids].sort(descending=True)
        ids = ids[order]
    else:
        return torch.arange(count, device=row.device), (row - total).exp()
    probabilities = (values - total).exp()
    if params.top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities
        kept = max(1, int((before < params.top_p).sum()))
        probabilities, ids = probabilities[:kept], ids[:kept]
    if params.min_p > 0.0:
        kept = max(1, int((probabilities >= params.min_p * probabilities[0]).sum()))
        probabilities, ids = probabilities[:kept], ids[:kept]
    return ids, probabilities / probabilities.sum()
