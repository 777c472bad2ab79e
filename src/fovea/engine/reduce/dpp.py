"""CDPruner (arXiv 2506.10967): keep tokens that differ from each other and, with a query, are relevant to it.

This is a determinantal point process (DPP) with the kernel L = diag(r) (S * P) diag(r). S holds the cosines
between tokens. r is the relevance of each token to the words, or 1 without words. P is an addition to the
paper: a Gaussian of the distance between two tokens. Because of it, equal things at two places both count.
The set with the largest determinant is searched greedily, one token at a time (arXiv 1709.05135): the next
token is the one with the largest residual d2, which is the share of it that the chosen tokens do not explain.

    j = argmax d2;   e = (L_j - C^T c_j) / sqrt(d2_j);   d2 -= e^2;   e is the next row of C

Step t reads t rows of C, so choosing k of N tokens takes O(N k^2) time and k x N floats. There are at most as
many independent tokens as the embedding has dimensions. When the chosen tokens explain all others, the
residuals are noise; from then on tokens are chosen as if none were chosen yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fovea.engine.reduce.base import ReducedTokens, ReductionInput, pick_tokens, unit_rows
from fovea.engine.vision.encoding import cuts

MAX_COMPARED, BAND = 1536, 512
"""Largest number of tokens that are all compared with each other, and tokens per band if there are more."""
DISTANCE = 2.0
"""Standard deviation of P, in cells: tokens much farther apart than this do not count as similar."""
NOISE = 1e-5
"""Residuals below this share of the largest token count as rounding noise of float32."""


def choose(image: ReductionInput, keep: int) -> ReducedTokens:
    return pick_tokens(image, _choose(image, None, keep))


def choose_with_query(image: ReductionInput, keep: int) -> ReducedTokens:
    return pick_tokens(image, _choose(image, image.query, keep))


def relevance(embeds: Tensor, query: Tensor) -> Tensor:
    """Mean cosine of each token with the words, scaled to [0, 1]; (N,), all 1 if the cosines are equal.

    The paper's code inverts the sign, which is right for CLIP's patches. In the decoder's own input space,
    similar things have high cosines.
    """
    cosines = (unit_rows(embeds) @ unit_rows(query).T).mean(1)
    low, high = cosines.min(), cosines.max()
    return (cosines - low) / (high - low) if high > low else torch.ones_like(cosines)


def _choose(image: ReductionInput, query: Tensor | None, keep: int) -> Tensor:
    rows = weighted_rows(image.embeds, query)
    places = cells(image.grid, rows.device)
    return choose_by_bands(NOISE + rows.norm(dim=1), keep, lambda band: dpp_kernel(rows[band], places[band]))


def dpp_kernel(rows: Tensor, places: Tensor) -> Tensor:
    """Kernel L, (N, N), of weighted rows (N, D) at places (N, 2), in cells."""
    return rows @ rows.T * torch.exp(-torch.cdist(places, places).square() / (2 * DISTANCE**2))


def cells(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Row and column of each token, (N, 2).

    A grid of one row means that no places are known. Then all tokens get the same place, so that distances do
    not count.
    """
    rows, columns = (torch.arange(count, device=device, dtype=torch.float32) for count in grid)
    return torch.cartesian_prod(rows, columns if grid[0] > 1 else torch.zeros_like(columns))


def weighted_rows(embeds: Tensor, query: Tensor | None) -> Tensor:
    """Rows whose products are L without P, (N, D) float32: of length 1, or as long as their relevance."""
    rows = unit_rows(embeds)
    if query is not None and len(query):
        rows = rows * relevance(embeds, query)[:, None]
    return rows


def choose_by_bands(weights: Tensor, keep: int, kernel: Callable[[slice], Tensor]) -> Tensor:
    """Choose `keep` of N tokens and return their numbers.

    Up to MAX_COMPARED tokens, `choose_greedily` runs once over all of them. With more tokens, it runs once
    per band of BAND consecutive tokens, and each band keeps a number of tokens in proportion to its weights.
    So time and memory grow linearly with the image. This matters because the step computes nothing else
    meanwhile: without bands, an image of 16,384 tokens took minutes.

    weights: (N,), all above 0.
    kernel: returns L of a range of tokens.
    """
    count = len(weights)
    if count <= MAX_COMPARED:
        return choose_greedily(kernel(slice(0, count)), keep)
    bands = list(cuts(count, BAND))
    sizes = [band.stop - band.start for band in bands]
    quotas = shares([float(weights[band].sum()) for band in bands], sizes, keep)
    choices = [
        band.start + choose_greedily(kernel(band), quota)
        for band, quota in zip(bands, quotas, strict=True)
        if quota
    ]
    return torch.cat(choices)


def shares(weights: Sequence[float], limits: Sequence[int], total: int) -> list[int]:
    """Divide `total` among bands in proportion to their weights, without exceeding their limits.

    weights: one per band, all above 0.
    limits: largest share of each band.
    total: at most the sum of `limits`.
    """
    quotas = [0] * len(weights)
    while left := total - sum(quotas):
        open_ = [number for number, limit in enumerate(limits) if quotas[number] < limit]
        whole = sum(weights[number] for number in open_)
        ideal = {number: left * weights[number] / whole for number in open_}
        for number in open_:
            quotas[number] += min(int(ideal[number]), limits[number] - quotas[number])
        if total - sum(quotas) == left:  # every ideal share is below one: the largest fractions get one each
            for number in sorted(open_, key=lambda number: -ideal[number])[:left]:
                quotas[number] += 1
    return quotas


def choose_greedily(kernel: Tensor, keep: int) -> Tensor:
    """Choose `keep` of N tokens by their kernel (N, N). Returns their numbers in the order of the choice."""
    whole = kernel.diagonal()
    left = whole.clone()
    noise = NOISE * (float(left.max()) or 1.0)
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
        factor = torch.sub(kernel[number], before[:, number] @ before, out=factors[step])
        factor *= residual**-0.5
        left.addcmul_(factor, factor, value=-1)
        left[number] = -torch.inf
        chosen.append(number)
    return torch.tensor(chosen, device=kernel.device)
