"""CDPruner (arXiv 2506.10967): tokens that differ from each other and, with a query, have to do with it.

A determinantal point process over L = diag(r) (S * P) diag(r): S holds the cosines between tokens, r how much each has to do with
the words, 1 for all where there are none. P, which the paper does not have, is a Gaussian of the distance between two tokens,
so that of two equal things at two places one does not stand for the other. The set of the largest determinant is found
greedily, one token at a time: the one with the largest residual d2, what the chosen ones do not explain of it (arXiv 1709.05135).

    j = argmax d2;   e = (L_j - C^T c_j) / sqrt(d2_j);   d2 -= e^2;   e is the next row of C

Step t reads t rows of C: O(N k^2) time, k x N floats. There are no more independent tokens than the embedding is wide: once
the chosen ones explain all that is left, the residuals are noise, and the rest is chosen as if nothing were chosen yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fovea.engine.reduce.base import Reduced, Seen, picked, unit_rows
from fovea.engine.vision.slices import cuts

MOST, BAND = 1536, 512
"""Tokens among which all are compared with all, at most, and of a band where there are more."""
APART = 2.0
"""Cells between two tokens from which they hardly count as alike, whatever they show: two equal things are two."""
EXPLAINED = 1e-5
"""Residuals below this share of the largest token are taken for float32's noise."""


def choose(seen: Seen, keep: int) -> Reduced:
    return picked(seen, _chosen(seen, None, keep))


def choose_with_query(seen: Seen, keep: int) -> Reduced:
    return picked(seen, _chosen(seen, seen.query, keep))


def relevance(embeds: Tensor, query: Tensor) -> Tensor:
    """Mean cosine of each token with the words, spread over [0, 1], (N,).

    The paper's code turns the sign around, which CLIP's patches need; in the decoder's own input space like is like.
    """
    near = (unit_rows(embeds) @ unit_rows(query).T).mean(1)
    low, high = near.min(), near.max()
    # Tokens that are all as near have nothing to tell them apart.
    return (near - low) / (high - low) if high > low else torch.ones_like(near)


def _chosen(seen: Seen, query: Tensor | None, keep: int) -> Tensor:
    rows = weighed(seen.embeds, query)
    places = cells(seen.grid, rows.device)
    return by_bands(EXPLAINED + rows.norm(dim=1), keep, lambda band: alike(rows[band], places[band]))


def alike(rows: Tensor, places: Tensor) -> Tensor:
    """L (N, N): what rows (N, D) have in common, the less the farther apart their places (N, 2) are, in cells."""
    return rows @ rows.T * torch.exp(-torch.cdist(places, places).square() / (2 * APART**2))


def cells(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Row and column of each token, (N, 2). Of tokens that are known as one long line alone, none is near another or far from it."""
    rows, columns = (torch.arange(count, device=device, dtype=torch.float32) for count in grid)
    return torch.cartesian_prod(rows, columns if grid[0] > 1 else torch.zeros_like(columns))


def weighed(embeds: Tensor, query: Tensor | None) -> Tensor:
    """Rows whose products are L: of length 1, or as long as they have to do with the words; (N, D) in float32."""
    rows = unit_rows(embeds)
    if query is not None and len(query):
        rows = rows * relevance(embeds, query)[:, None]
    return rows


def by_bands(weights: Tensor, keep: int, kernel: Callable[[slice], Tensor]) -> Tensor:
    """Numbers of `keep` tokens. kernel: L of a range of them. weights (N,): more than 0, what each counts where bands share.

    Up to MOST tokens it is `greedy` over all. Beyond, each BAND of tokens that follow each other gives its share by weight: time and
    memory then grow like the image does. Nobody else's tokens come while this runs, and a picture of 16,384 took minutes.
    """
    count = len(weights)
    if count <= MOST:
        return greedy(kernel(slice(0, count)), keep)
    bands = list(cuts(count, BAND))
    sizes = [band.stop - band.start for band in bands]
    quotas = shares([float(weights[band].sum()) for band in bands], sizes, keep)
    chosen = [
        band.start + greedy(kernel(band), quota) for band, quota in zip(bands, quotas, strict=True) if quota
    ]
    return torch.cat(chosen)


def shares(weights: Sequence[float], most: Sequence[int], total: int) -> list[int]:
    """`total`, at most the sum of `most`, divided by weights, all more than 0; nobody gets more than its `most`."""
    given = [0] * len(weights)
    while left := total - sum(given):
        open_ = [number for number, limit in enumerate(most) if given[number] < limit]
        whole = sum(weights[number] for number in open_)
        wanted = {number: left * weights[number] / whole for number in open_}
        for number in open_:
            given[number] += min(int(wanted[number]), most[number] - given[number])
        if total - sum(given) == left:  # less than one for each: the largest fractions
            for number in sorted(open_, key=lambda number: -wanted[number])[:left]:
                given[number] += 1
    return given


def greedy(kernel: Tensor, keep: int) -> Tensor:
    """Numbers of `keep` tokens in the order in which they were chosen."""
    whole = kernel.diagonal()
    left = whole.clone()
    noise = EXPLAINED * (float(left.max()) or 1.0)
    factors = kernel.new_empty((keep, len(kernel)))
    chosen: list[int] = []
    first = 0
    for step in range(keep):
        number = int(left.argmax())
        if float(left[number]) <= noise:
            left = whole.clone()
            left[chosen] = -torch.inf
            number, first = int(left.argmax()), step
        before, residual = factors[first:step], max(float(left[number]), noise)
        made = torch.sub(kernel[number], before[:, number] @ before, out=factors[step])
        made *= residual**-0.5
        left.addcmul_(made, made, value=-1)
        left[number] = -torch.inf
        chosen.append(number)
    return torch.tensor(chosen, device=kernel.device)
