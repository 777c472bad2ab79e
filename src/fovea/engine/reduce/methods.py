"""The methods of token reduction that work on the encoder's output. Two are baselines for all others.

Each takes a `ReductionInput` and the number of tokens to keep, and returns `ReducedTokens`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType

import torch
from torch import Tensor

from fovea.core.errors import EngineError
from fovea.engine.reduce.base import (
    ReducedTokens,
    ReduceFunction,
    Reducer,
    ReductionInput,
    merge_tokens,
    pick_tokens,
    top_indices,
    unit_rows,
)
from fovea.engine.vision.encoding import cuts
from fovea.engine.visual_budget.methods import find_method

PIVOTS = 4
"""Number of pivots of the image, and of the words."""
MAX_COMPARED, BAND = 1536, 512
"""Largest number of tokens that are all compared with each other, and tokens per band if there are more."""
DISTANCE = 2.0
"""Standard deviation of P, in cells: tokens much farther apart than this do not count as similar."""
NOISE = 1e-5
"""Residuals below this share of the largest token count as rounding noise of float32."""
CONTEXTUAL = 10, 64
"""Number of contextual tokens, and the number of kept tokens that contain them."""
MERGE_SHARE = 1 / 8
"""Largest share of the tokens that one round merges."""


def reducer(name: str) -> Reducer:
    """Return the implementation of a method.

    Raises InvalidRequest for an unknown method, EngineError for one that does not reduce encoded tokens.
    """
    known = find_method(name)
    if known.kind != "encoder":
        raise EngineError(f"{name} works before the encoder, so it does not reduce encoded tokens")
    return Reducer(known, _FUNCTIONS[name])


def choose_uniform(image: ReductionInput, keep: int) -> ReducedTokens:
    return pick_tokens(image, torch.tensor(spread_cells(*image.grid, keep), device=image.embeds.device))


def spread_cells(rows: int, columns: int, keep: int) -> list[int]:
    """Choose `keep` cells of a grid: some rows at equal distances, and in each row cells at equal distances.

    The number of rows is chosen so that both distances are about equal. If `keep` is not a multiple of it,
    some rows have one cell more. Returns the numbers of the cells in raster order.
    """
    lines = round(math.sqrt(keep * rows / columns))
    lines = min(rows, keep, max(lines, -(-keep // columns)))
    cells = []
    for line in range(lines):
        row = (2 * line + 1) * rows // (2 * lines)
        count = (line + 1) * keep // lines - line * keep // lines
        cells += [row * columns + (2 * place + 1) * columns // (2 * count) for place in range(count)]
    return cells


def choose_random(image: ReductionInput, keep: int) -> ReducedTokens:
    """Draw with Python's generator: it hashes the seed with SHA-512, so all machines draw the same tokens."""
    numbers = Random(f"visual tokens {image.seed}").sample(range(image.count), keep)
    return pick_tokens(image, torch.tensor(numbers, device=image.embeds.device))


def choose_dart(image: ReductionInput, keep: int) -> ReducedTokens:
    """DART (arXiv 2502.11494): keep a few strong tokens and those least similar to them; drop duplicates.

    The pivots are the strongest tokens of the image, then those of the words, strongest first. Each pivot
    in turn selects the same number of the remaining tokens, those with the lowest cosine to it. The paper
    keeps pivots + 8 * floor(...) tokens and states no order of the pivots. Here the order is fixed, and
    the first pivots select one token more if the number does not divide, so that the count is exact.

    There are three variants:

    dart_k      the paper's. It works on the hidden states and keys after the decoder's second layer. The
                kept tokens are then computed again from the first layer on, so that the KV of every layer
                holds the same tokens.
    dart        works on the decoder's input embeddings and needs no layer.
    dart_query  like dart, with pivots among the user's words as well.
    """
    return pick_tokens(image, choose_distinct(image.embeds, strength(image.embeds), image.embeds[:0], keep))


def choose_dart_with_query(image: ReductionInput, keep: int) -> ReducedTokens:
    words = image.embeds[:0] if image.query is None else image.query
    pivots = words[top_indices(strength(words), PIVOTS)]
    return pick_tokens(image, choose_distinct(image.embeds, strength(image.embeds), pivots, keep))


def choose_dart_in_decoder(image: ReductionInput, keep: int) -> ReducedTokens:
    """The variant `dart_k`. The words are the tokens after the image."""
    probe = image.probe
    assert probe is not None
    end = probe.start + image.count
    norms = strength(probe.keys)
    words = probe.hidden[end:][top_indices(norms[end:], PIVOTS)]
    rows = slice(probe.start, end)
    return pick_tokens(image, choose_distinct(probe.hidden[rows], norms[rows], words, keep))


def strength(rows: Tensor) -> Tensor:
    """L1 norms (N,) of rows (N, ...)."""
    return rows.float().flatten(1).abs().sum(1)


def choose_distinct(states: Tensor, norms: Tensor, words: Tensor, keep: int) -> Tensor:
    """Choose `keep` of N tokens and return their numbers.

    states: (N, D), compared by cosine.
    norms: (N,), strength of the tokens.
    words: (P, D), pivots in addition to those of the image.
    """
    first = top_indices(norms, min(PIVOTS, keep))
    unit = unit_rows(states)
    cosines = torch.cat((unit[first], unit_rows(words))) @ unit.T
    cosines[:, first] = torch.inf
    choices, pivots, left = [first], len(cosines), keep - len(first)
    for number, row in enumerate(cosines):
        quota = left // pivots + (number < left % pivots)
        choice = row.argsort(stable=True)[:quota]
        cosines[:, choice] = torch.inf
        choices.append(choice)
    return torch.cat(choices)


def choose_dpp(image: ReductionInput, keep: int) -> ReducedTokens:
    """CDPruner (arXiv 2506.10967): keep tokens that differ from each other and are relevant to a query.

    This is a determinantal point process (DPP) with the kernel L = diag(r) (S * P) diag(r). S holds the
    cosines between tokens. r is the relevance of each token to the words, or 1 without words. P is an
    addition to the paper: a Gaussian of the distance between two tokens. Because of it, equal things at
    two places both count. The set with the largest determinant is searched greedily, one token at a time
    (arXiv 1709.05135): the next token is the one with the largest residual d2, which is the share of it
    that the chosen tokens do not explain.

        j = argmax d2;   e = (L_j - C^T c_j) / sqrt(d2_j);   d2 -= e^2;   e is the next row of C

    Step t reads t rows of C, so choosing k of N tokens takes O(N k^2) time and k x N floats. There are at
    most as many independent tokens as the embedding has dimensions. When the chosen tokens explain all
    others, the residuals are noise; from then on tokens are chosen as if none were chosen yet.
    """
    return pick_tokens(image, _choose(image, None, keep))


def choose_dpp_with_query(image: ReductionInput, keep: int) -> ReducedTokens:
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


def choose_visionzip(image: ReductionInput, keep: int) -> ReducedTokens:
    """VisionZip (arXiv 2412.04467): keep the tokens that the encoder attends to, and merge the rest.

    54 of 64 kept tokens are dominant: those that received the most attention. The other kept tokens are
    contextual, and are spread evenly over the rest. Each remaining token is merged into the contextual
    token with the nearest key. A contextual token becomes the mean of itself and all tokens merged into
    it. (The paper's code instead adds the mean of the others to it, which about doubles its length.)
    """
    assert image.attention is not None
    assert image.keys is not None
    contextual = keep * CONTEXTUAL[0] // CONTEXTUAL[1]
    stays = torch.zeros(image.count, dtype=torch.bool, device=image.embeds.device)
    stays[top_indices(image.attention, keep - contextual)] = True
    rest = (~stays).nonzero()[:, 0]
    if contextual:
        targets = rest[torch.arange(contextual, device=rest.device) * (len(rest) // contextual)]
        stays[targets] = True
    index = stays.nonzero()[:, 0]
    members = torch.full((image.count,), -1, device=index.device)
    members[index] = torch.arange(keep, device=index.device)
    if contextual:
        keys = unit_rows(image.keys)
        others = (members < 0).nonzero()[:, 0]
        nearest = (keys[others] @ keys[targets].T).argmax(1)
        members[others] = members[targets][nearest]
    return merge_tokens(image, index, members)


def choose_tome(image: ReductionInput, keep: int) -> ReducedTokens:
    """ToMe (arXiv 2210.09461) on the encoder's output: merge similar tokens until the wanted number is left.

    Every round divides the tokens alternately into two sides. Each token of the first side is paired with
    the nearest token of the second, by cosine, and the nearest of these pairs are merged. A merged token
    is the mean of all tokens that went into it, and has the place of the pair's second token.

    The paper merges inside the encoder, by the keys of its attention, which also saves the encoder's
    time. Here the embeddings are compared. A round merges at most an eighth of the tokens, so that no
    dissimilar pairs are merged early.
    """
    sums, count = image.embeds.float(), image.count
    index = members = torch.arange(count, device=sums.device)
    while count > keep:
        cosines, nearest = nearest_pairs(sums)
        removed = top_indices(cosines, min(count - keep, max(1, int(count * MERGE_SHARE))))
        new_rows, stays = merge_pairs(count, removed, nearest)
        # Sums replace means here: they have the same direction, and a cosine does not depend on the length.
        sums = sums.new_zeros((int(stays.sum()), sums.shape[1])).index_add_(0, new_rows, sums)
        index, members, count = index[stays], new_rows[members], len(sums)
    return merge_tokens(image, index, members)


def nearest_pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Pair each row of the first side (0, 2, 4...) with the nearest row of the second side (1, 3, 5...).

    Returns the cosine of each pair, and the number of its second row within the second side.
    """
    unit = unit_rows(rows)
    cosines, nearest = (unit[::2] @ unit[1::2].T).max(1)
    return cosines, nearest


def merge_pairs(count: int, removed: Tensor, nearest: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber `count` rows after some of the first side are merged into their nearest of the second.

    removed: numbers, within the first side, of the rows that are merged away.
    nearest: as from `nearest_pairs`.

    Returns the new row of each old row, (count,), and a mask of the rows that stay, (count,) bool.
    """
    targets = torch.arange(count, device=removed.device)
    stays = torch.ones_like(targets, dtype=torch.bool)
    stays[2 * removed] = False
    rows = stays.cumsum(0) - 1
    targets[2 * removed] = 2 * nearest[removed] + 1
    return rows[targets], stays


def choose_fastv(image: ReductionInput, keep: int) -> ReducedTokens:
    """FastV (arXiv 2403.06764): keep the tokens to which the prompt's last token attends most.

    The paper drops tokens between two layers. Here the layers before that run only for the choice
    (`run_probe`). The kept tokens are then computed again from the first layer on, so that the KV
    of every layer holds the same tokens. For the scores, one query row is recomputed.

    FastV is known to lose text: in early layers the last row prefers late tokens, and printed text covers
    more tokens than it ranks high.
    """
    assert image.probe is not None
    return pick_tokens(image, top_indices(image.probe.scores, keep))


_FUNCTIONS: Mapping[str, ReduceFunction] = MappingProxyType(
    {
        "uniform": choose_uniform,
        "random": choose_random,
        "dart": choose_dart,
        "dart_query": choose_dart_with_query,
        "dart_k": choose_dart_in_decoder,
        "dpp": choose_dpp,
        "dpp_query": choose_dpp_with_query,
        "visionzip": choose_visionzip,
        "tome": choose_tome,
        "fastv": choose_fastv,
    }
)
