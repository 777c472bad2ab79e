"""Log probabilities of the tokens of prompts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from fovea.core.sampling import LOWEST_LOGPROB
from fovea.engine.events import PromptToken
from fovea.engine.schedule.plan import Work

ROWS = 64
"""Rows whose logits are in memory at a time."""


def prompt_rows(item: Work) -> range:
    """Positions of a step's work whose logits tell the log probability of the next token of the prompt.

    Call it only for sequences with `scores_prompt`.
    """
    return range(item.start, min(item.stop, len(item.seq.prompt_ids) - 1))


def score_prompt(
    hidden: Tensor, places: Seq[int], ids: Seq[int], most: int, logits: Callable[[Tensor], Tensor]
) -> list[PromptToken]:
    """Return the log probability and rank of each token, and the most likely tokens of its place.

    A token that the model cannot choose, such as the image token of some models, has the lowest probability.

    hidden: (len(places), hidden), the states before the tokens.
    places: positions of the tokens in the prompt.
    ids: the tokens.
    most: number of the most likely tokens to return.
    logits: turns states into logits, (rows, vocabulary) float32.
    """
    scored: list[PromptToken] = []
    for at in range(0, len(places), ROWS):
        values = torch.log_softmax(logits(hidden[at : at + ROWS]), -1)
        values = values.nan_to_num(nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB)
        wanted = torch.tensor(list(ids[at : at + ROWS]), device=values.device)[:, None]
        size = values.shape[1]
        own = values.gather(1, wanted.clamp(max=size - 1)).masked_fill(wanted >= size, LOWEST_LOGPROB)
        ranks = (values > own).sum(-1) + 1
        best = values.topk(min(most, values.shape[1]), dim=-1)
        rows = zip(
            places[at : at + ROWS],
            ids[at : at + ROWS],
            own[:, 0].tolist(),
            ranks.tolist(),
            best.indices.tolist(),
            best.values.tolist(),
            strict=True,
        )
        for place, token, logprob, rank, tops, top_values in rows:
            top = tuple(zip(tops, top_values, strict=True))
            scored.append(PromptToken(place, token, logprob, top, rank))
    return scored
