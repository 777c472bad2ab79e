"""Draws tokens for many rows at once on the device; the host waits only for the results.

Each row follows the rules of `logits.distribution`. Only the most likely tokens of a row are considered as
candidates. If they may not contain all candidates, the row is marked as unsure, and the caller draws it again
by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fovea.core.sampling import SamplingParams
from fovea.engine.sample.logits import NUCLEUS_GUESS, TINY


def draw(logits: Tensor, params: Sequence[SamplingParams], points: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Draw one token per row. Either all rows have a filter (top-k, top-p or min-p), or none has.

    logits: (rows, vocabulary) float32.
    params: sampling parameters of each row.
    points: one random number in [0, 1) for each row.

    Returns tokens, (rows,), and a mask (rows,) that is False for rows whose candidates may be incomplete, and
    for rows of a broken model, without a finite maximum.
    """
    table = _table(params, points, logits.device)
    highest = logits.amax(-1, keepdim=True)
    usable = highest.isfinite()[:, 0]
    rows = (logits - highest) / table[:, 0:1]
    point = table[:, 4:5]
    if not has_filter(params[0]):
        return _pick(rows.softmax(-1), point), usable
    values, candidates = rows.topk(min(NUCLEUS_GUESS, rows.shape[1]))
    probabilities, sure = _filter(rows, values, table)
    index = _pick(probabilities, point)
    return candidates.gather(1, index[:, None])[:, 0], sure & usable


def has_filter(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p is set."""
    return bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0


def _table(params: Sequence[SamplingParams], points: Sequence[float], device: torch.device) -> Tensor:
    """Temperature, top_k (0: none), top_p, min_p and point of each row, (rows, 5)."""
    table = torch.tensor(
        [
            (max(row.temperature, TINY), row.top_k, row.top_p, row.min_p, point)
            for row, point in zip(params, points, strict=True)
        ]
    )
    return _to_device(table, device)


def row_index(rows: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of rows as a tensor on the device, to index a batch."""
    return _to_device(torch.tensor(rows, dtype=torch.int64), device)


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device. From memory that is not pinned, a copy would wait for all launched work."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _filter(rows: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the filters to the candidates of each row.

    rows: (rows, vocabulary), logits divided by the temperature.
    values: (rows, candidates), those of the candidates, highest first.
    table: from `_table`.

    Returns probabilities (rows, candidates), 0 for a candidate that a filter removes, and a mask (rows,):
    True if no token outside the candidates passes the filters.
    """
    top_k, top_p, min_p = table[:, 1:2], table[:, 2:3], table[:, 3:4]
    count, everything = values.shape[1], rows.shape[1]
    rank = torch.arange(count, device=rows.device)
    limited = top_k > 0
    within = ~limited | (rank < top_k)
    masked = torch.where(within, values, -torch.inf)
    total = torch.where(limited, masked.logsumexp(-1, keepdim=True), rows.logsumexp(-1, keepdim=True))
    p = (masked - total).exp()
    before = p.cumsum(-1) - p
    floor = min_p * p[:, :1]
    passes = within & ((top_p >= 1) | (before < top_p)) & (p >= floor)
    passes[:, 0] = True
    # The candidates are complete if a filter ends before the last of them.
    ends = limited
    ends = ends | (top_p < 1) & (p.sum(-1, keepdim=True) >= top_p)
    ends = ends | (min_p > 0) & (p[:, -1:] < floor)
    # A top-k larger than the number of candidates needs a sum over more tokens than these.
    sure = (ends & (top_k <= count))[:, 0] | (count == everything)
    return torch.where(passes, p, 0.0), sure


def _pick(p: Tensor, point: Tensor) -> Tensor:
    """First index in each row at which the cumulative sum of p exceeds `point` times the total, (rows,)."""
    bounds = p.cumsum(-1)
    index = torch.searchsorted(bounds, point * bounds[:, -1:], right=True)
    # Rounding may lead past the last candidate whose probability is not 0.
    last = p.shape[1] - 1 - (p > 0).flip(-1).int().argmax(-1, keepdim=True)
    return torch.minimum(index, last)[:, 0]
