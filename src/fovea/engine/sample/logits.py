"""Changes to a row of logits before a token is drawn: bias, penalties and filters.

Every function takes the float32 row (vocabulary,) of one request. Requests share nothing, so other requests
of the batch cannot change an answer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fovea.core.sampling import SamplingParams

NUCLEUS_GUESS = 1024
"""Number of most likely tokens in which the candidates of top-p are searched first."""
TINY = 1e-30
"""Lower bound of the temperature as a divisor."""


def adjust(
    row: Tensor, params: SamplingParams, prompt: list[int], output: list[int], forbidden: frozenset[int]
) -> Tensor:
    """Apply bias and penalties in OpenAI's order, then set forbidden ids to -inf. Returns a new row.

    prompt, output: token ids of the prompt and of the answer so far.
    forbidden: ids that must not come yet, because of min_tokens.
    """
    row = row.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted({*prompt, *output}), device=row.device)
        values = row[ids]
        row[ids] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.unique(torch.tensor(output, device=row.device), return_counts=True)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(row.dtype)
    if forbidden:
        row[torch.tensor(sorted(forbidden), device=row.device)] = float("-inf")
    return row


def needs_adjusting(params: SamplingParams, forbidden: frozenset[int]) -> bool:
    """Whether `adjust` would change a row."""
    return bool(
        params.logit_bias
        or forbidden
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def distribution(row: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Ids of the candidates and their probabilities, after temperature, top-k, top-p and min-p.

    With a filter, the most likely candidate comes first. Without one, candidates are ordered by id: sorting a
    vocabulary costs more than drawing from it.
    """
    # With a maximum of 0, no temperature above zero, however small, makes a logit +inf.
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
        passing = max(1, int((before < params.top_p).sum()))
        probabilities, ids = probabilities[:passing], ids[:passing]
    if params.min_p > 0.0:
        passing = max(1, int((probabilities >= params.min_p * probabilities[0]).sum()))
        probabilities, ids = probabilities[:passing], ids[:passing]
    return ids, probabilities / probabilities.sum()
