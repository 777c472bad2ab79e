"""Draws for many rows at once, on the device, without asking it anything in between.

The rules are those of `logits.distribution`, row by row. Candidates are looked for among the most likely ones; where these
do not hold all of them, the row says so together with its token, and is drawn again by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fovea.core.sampling import SamplingParams
from fovea.engine.sample.logits import NUCLEUS_GUESS, TINY


def draw(logits: Tensor, asked: Sequence[SamplingParams], points: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Tokens (rows,), and whether each is to be trusted (rows,). logits (rows, vocabulary) float32; points: one number of
    [0, 1) for each row. All rows have a filter (top-k, top-p or min-p), or none has."""
    table = _table(asked, points, logits.device)
    rows = (logits - logits.amax(-1, keepdim=True)) / table[:, 0:1]
    point = table[:, 4:5]
    if not filtered(asked[0]):
        ids = _pick(rows.softmax(-1), point)
        return ids, torch.ones_like(ids, dtype=torch.bool)
    values, candidates = rows.topk(min(NUCLEUS_GUESS, rows.shape[1]))
    chosen, sure = _chosen(rows, values, table)
    index = _pick(chosen, point)
    return candidates.gather(1, index[:, None])[:, 0], sure


def filtered(params: SamplingParams) -> bool:
    return bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0


def _table(asked: Sequence[SamplingParams], points: Sequence[float], device: torch.device) -> Tensor:
    """temperature, top_k (0: none), top_p, min_p and point of each row."""
    found = torch.tensor(
        [
            (max(params.temperature, TINY), params.top_k, params.top_p, params.min_p, point)
            for params, point in zip(asked, points, strict=True)
        ]
    )
    return _sent(found, device)


def index(rows: Sequence[int], device: torch.device) -> Tensor:
    """Rows of a batch, to index it with."""
    return _sent(torch.tensor(rows), device)


def _sent(made: Tensor, device: torch.device) -> Tensor:
    """On the device. From memory that is not pinned, a copy would wait for all that is launched."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _chosen(rows: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (rows, candidates), 0 where a filter takes a candidate away; and whether no other could be chosen."""
    top_k, top_p, min_p = table[:, 1:2], table[:, 2:3], table[:, 3:4]
    count, everything = values.shape[1], rows.shape[1]
    rank = torch.arange(count, device=rows.device)
    limited = top_k > 0
    within = ~limited | (rank < top_k)
    kept = torch.where(within, values, -torch.inf)
    total = torch.where(limited, kept.logsumexp(-1, keepdim=True), rows.logsumexp(-1, keepdim=True))
    p = (kept - total).exp()
    before = p.cumsum(-1) - p
    floor = min_p * p[:, :1]
    passes = within & ((top_p >= 1) | (before < top_p)) & (p >= floor)
    passes[:, 0] = True
    # The candidates are enough where a filter ends before them.
    ends = limited
    ends = ends | (top_p < 1) & (p.sum(-1, keepdim=True) >= top_p)
    ends = ends | (min_p > 0) & (p[:, -1:] < floor)
    # A top-k of more than these has a sum that they do not have.
    sure = (ends & (top_k <= count))[:, 0] | (count == everything)
    return torch.where(passes, p, 0.0), sure


def _pick(p: Tensor, point: Tensor) -> Tensor:
    """The index in each row at which the sum of p passes the point's share of all of it, (rows,)."""
    bounds = p.cumsum(-1)
    index = torch.searchsorted(bounds, point * bounds[:, -1:], right=True)
    # Rounding may lead past the last candidate that has any weight.
    last = p.shape[1] - 1 - (p > 0).flip(-1).int().argmax(-1, keepdim=True)
    return torch.minimum(index, last)[:, 0]
