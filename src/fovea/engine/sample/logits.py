"""From logits to tokens, one row after the other: masks, penalties, filters and draws. Scores of prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fovea.core.sampling import LOWEST_LOGPROB, SamplingParams
from fovea.engine.grammar.guide import Masks
from fovea.engine.job import PromptToken
from fovea.engine.schedule.plan import Work
from fovea.kernels.transfer import row_index

NUCLEUS_GUESS = 1024
"""Number of most likely tokens in which the candidates of top-p are searched first."""
TINY = 1e-30
"""Lower bound of the temperature as a divisor."""
HIGHEST, LOWEST = 1e30, -1e30
"""Logits in place of +inf and NaN. Penalties cannot make them infinite."""
LIMIT = torch.finfo(torch.float32).max


def repair(row: Tensor) -> Tensor:
    """Return a row that has a most likely token: the row itself, unless the model computed no such row.

    A broken model may compute NaN, +inf, or -inf for every token. NaN then counts as very unlikely, and +inf
    as very likely.
    """
    if math.isfinite(float(row.max())):
        return row
    return row.nan_to_num(nan=LOWEST, posinf=HIGHEST, neginf=LOWEST)


def adjust(
    row: Tensor, params: SamplingParams, seen: Tensor | None, output: list[int], forbidden: frozenset[int]
) -> Tensor:
    """Leave the allowed ids, apply bias and penalties in OpenAI's order, then set forbidden ids to -inf.

    Returns a new row.

    row: a row from `repair`.
    seen: distinct token ids of the prompt and of the answer so far; None: there is no repetition penalty.
    output: token ids of the answer so far.
    forbidden: ids that must not come now, because of min_tokens or bad_words.
    """
    row = row.clone()
    if params.allowed_token_ids:
        allowed = torch.tensor(params.allowed_token_ids, device=row.device)
        row = torch.full_like(row, -math.inf).index_copy(0, allowed, row[allowed])
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    if seen is not None and params.repetition_penalty != 1.0:
        values = row[seen]
        values = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
        row[seen] = values.clamp(-LIMIT, LIMIT).masked_fill(row[seen] == -math.inf, -math.inf)
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.unique(torch.tensor(output, device=row.device), return_counts=True)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(row.dtype)
    return _ban(row, forbidden) if forbidden else row


def _ban(row: Tensor, forbidden: frozenset[int]) -> Tensor:
    """Set forbidden ids to -inf, unless they are all ids. Changes `row`.

    Ids outside the vocabulary cannot come anyway: some checkpoints name such an end token.
    """
    known = [token for token in sorted(forbidden) if token < row.shape[0]]
    ids = torch.tensor(known, dtype=torch.int64, device=row.device)
    if len(ids) == row.shape[0]:
        return row
    row[ids] = -math.inf
    if float(row.max()) > -math.inf:
        return row
    # The model considers only forbidden tokens possible. Then all others are equally likely.
    return torch.zeros_like(row).index_fill(0, ids, -math.inf)


def needs_adjusting(params: SamplingParams, forbidden: frozenset[int] = frozenset()) -> bool:
    """Whether `adjust` would change a row."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or forbidden
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def distribution(row: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Ids of the candidates and their probabilities, after temperature, top-k, top-p and min-p.

    row: from `repair` or `adjust`, so its maximum is finite.

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


def choose(ids: Tensor, probabilities: Tensor, point: float) -> int:
    """Return the candidate at which the cumulative probability exceeds `point` times the total.

    point: a random number in [0, 1).
    """
    bounds = probabilities.cumsum(0)
    place = int(torch.searchsorted(bounds, point * float(bounds[-1]), right=True))
    if place == len(ids):
        # Rounding led past the end. The last candidates may be forbidden: their probability is 0.
        place = int(torch.nonzero(probabilities)[-1])
    return int(ids[place])


def has_filter(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p is set."""
    return bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0


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


class SeenTokens:
    """The distinct ids of a prompt and of the answer so far.

    Every token is read once. A set of the whole prompt for each new token would take milliseconds: a request
    with a long prompt would slow down the steps of all others.
    """

    def __init__(self, prompt: Sequence[int], vocabulary: int, device: torch.device) -> None:
        """Read the prompt.

        vocabulary: number of ids that the model can choose. Larger ids of the prompt, which some models have
            for images, are left out: there is nothing to penalize.
        device: device of the returned ids.
        """
        self._known = bytearray(vocabulary)
        self._read = 0
        self._ids = torch.empty(0, dtype=torch.int64, device=device)
        self._add(prompt)

    def update(self, output: Sequence[int]) -> Tensor:
        """Return all distinct ids, in the order of their first occurrence.

        output: the whole answer so far; it only grows from call to call.
        """
        self._add(output[self._read :])
        self._read = len(output)
        return self._ids

    def _add(self, tokens: Sequence[int]) -> None:
        new = []
        for token in tokens:
            if token < len(self._known) and not self._known[token]:
                self._known[token] = 1
                new.append(token)
        if new:
            self._ids = torch.cat((self._ids, torch.tensor(new, device=self._ids.device)))


ROWS = 64
"""Rows whose logits are in memory at a time."""


def prompt_rows(item: Work) -> range:
    """Positions of a step's work whose logits tell the log probability of the next token of the prompt.

    Call it only for sequences with `scores_prompt`.
    """
    return range(item.start, min(item.stop, len(item.seq.prompt_ids) - 1))


def score_prompt(
    hidden: Tensor, places: Sequence[int], ids: Sequence[int], most: int, logits: Callable[[Tensor], Tensor]
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
        wanted = row_index(ids[at : at + ROWS], values.device)[:, None]
        size = values.shape[1]
        own = values.gather(1, wanted.clamp(max=size - 1)).masked_fill(wanted >= size, LOWEST_LOGPROB)
        ranks = (values > own).sum(-1, keepdim=True) + 1
        best = values.topk(min(most, size), dim=-1)
        # One wait for all. Numbers of both kinds, ids and float32, are exact in float64.
        parts = [part.double() for part in (own, ranks, best.values, best.indices)]
        rows = zip(places[at:], ids[at:], torch.cat(parts, 1).tolist(), strict=False)
        for place, token, (logprob, rank, *tops) in rows:
            half = len(tops) // 2
            top = tuple(zip(map(int, tops[half:]), tops[:half], strict=True))
            scored.append(PromptToken(place, token, logprob, top, int(rank)))
    return scored
