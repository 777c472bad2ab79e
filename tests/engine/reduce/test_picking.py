"""DART, DPP and FastV, compared with plain loops and with properties that they must have."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fovea.engine.reduce import methods
from fovea.engine.reduce.methods import reducer
from tests.support.reduction import BEFORE, reduction_input

Rows = list[list[float]]


def kernel_of(embeds: Tensor, query: Tensor | None) -> Tensor:
    rows = methods.weighted_rows(embeds, query)
    return rows @ rows.T


def cosine(one: list[float], other: list[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / math.sqrt(sum(a * a for a in one) * sum(b * b for b in other))


def naive_dart(
    states: Rows, norms: list[float], words: Rows, word_norms: list[float], keep: int
) -> list[int]:
    """The steps of the paper, one token at a time."""
    pivots = sorted(range(len(states)), key=lambda i: -norms[i])[: min(4, keep)]
    texts = sorted(range(len(words)), key=lambda i: -word_norms[i])[:4]
    vectors = [states[i] for i in pivots] + [words[i] for i in texts]
    chosen, left = list(pivots), keep - len(pivots)
    for number, pivot in enumerate(vectors):
        quota = left // len(vectors) + (1 if number < left % len(vectors) else 0)
        for _ in range(quota):
            free = [i for i in range(len(states)) if i not in chosen]
            chosen.append(min(free, key=lambda i: cosine(states[i], pivot)))
    return sorted(chosen)


def naive_greedy(kernel: Tensor, keep: int) -> list[int]:
    """Choose step by step the token with the largest determinant, computing every determinant again."""
    chosen: list[int] = []
    for _ in range(keep):
        free = [i for i in range(len(kernel)) if i not in chosen]
        chosen.append(
            max(free, key=lambda i: float(torch.det(kernel[[*chosen, i]][:, [*chosen, i]].double())))
        )
    return chosen


def l1(rows: Tensor) -> list[float]:
    return [sum(abs(value) for value in row) for row in rows.flatten(1).tolist()]


@pytest.mark.parametrize("keep", [1, 3, 4, 5, 11, 12, 13, 30, 41])
def test_dart_equals_the_loop(keep: int) -> None:
    image = reduction_input(6, 7)
    assert image.query is not None
    states, words = image.embeds.tolist(), image.query.tolist()
    alone = naive_dart(states, l1(image.embeds), [], [], keep)
    with_words = naive_dart(states, l1(image.embeds), words, l1(image.query), keep)
    assert reducer("dart").reduce(image, keep).index.tolist() == alone
    assert reducer("dart_query").reduce(image, keep).index.tolist() == with_words


@pytest.mark.parametrize("keep", [3, 12, 30])
def test_dart_in_the_decoder_equals_the_loop_on_its_states(keep: int) -> None:
    image = reduction_input(6, 7)
    probe = image.probe
    assert probe is not None
    hidden, norms = probe.hidden.tolist(), l1(probe.keys)
    first, end = BEFORE, BEFORE + 42
    expected = naive_dart(hidden[first:end], norms[first:end], hidden[end:], norms[end:], keep)
    assert reducer("dart_k").reduce(image, keep).index.tolist() == expected


def test_dart_drops_duplicates_of_strong_tokens() -> None:
    """Thirty of forty tokens are copies of the strongest one. All ten others are kept."""
    image = reduction_input(5, 8)
    image.embeds[5:35] = 3 * image.embeds[5]
    kept = reducer("dart").reduce(image, 14).index.tolist()
    assert {*range(5), *range(35, 40)} <= set(kept)


def test_the_strongest_token_is_a_pivot() -> None:
    image = reduction_input(5, 8)
    image.embeds[17] *= 10
    assert reducer("dart").reduce(image, 1).index.tolist() == [17]
    assert int(methods.strength(image.embeds).argmax()) == 17


@pytest.mark.parametrize("with_query", [False, True])
def test_dpp_is_greedy_in_the_determinant(with_query: bool) -> None:
    for seed in range(8):
        image = reduction_input(3, 4, seed, width=20)
        kernel = kernel_of(image.embeds, image.query if with_query else None)
        assert methods.choose_greedily(kernel, 7).tolist() == naive_greedy(kernel, 7)


def test_the_second_token_is_the_best_partner_of_the_first() -> None:
    """Brute force over all pairs with the first token must find the pair that the greedy search finds.

    Without a query all tokens are equally good as the first one.
    """
    image = reduction_input(3, 4, width=20)
    kernel = kernel_of(image.embeds, None)
    first, second = methods.choose_greedily(kernel, 2).tolist()
    best = max(
        (pair for pair in itertools.combinations(range(12), 2) if first in pair),
        key=lambda pair: float(torch.det(kernel[list(pair)][:, list(pair)])),
    )
    assert set(best) == {first, second}


def test_three_groups_give_one_each() -> None:
    centres = torch.eye(3, 16)
    embeds = centres.repeat_interleave(4, 0) + 0.05 * torch.randn(
        12, 16, generator=torch.Generator().manual_seed(0)
    )
    chosen = methods.choose_greedily(kernel_of(embeds, None), 3)
    assert sorted((chosen // 4).tolist()) == [0, 1, 2]


def test_more_tokens_than_the_embedding_is_wide() -> None:
    """Eight tokens explain an embedding of eight dimensions, so only rounding noise is left after them.

    The square root of this noise made the choice of all further tokens meaningless.
    """
    image = reduction_input(6, 7, width=8)
    chosen = methods.choose_greedily(kernel_of(image.embeds, None), 24).tolist()
    assert len(set(chosen)) == 24
    rest = [i for i in range(42) if i not in chosen[:8]]
    kernel = kernel_of(image.embeds[rest], None)
    assert chosen[8:16] == [rest[i] for i in naive_greedy(kernel, 8)]


@given(
    st.lists(st.tuples(st.floats(1e-5, 1e3), st.integers(1, 50)), min_size=1, max_size=12), st.floats(0, 1)
)
def test_shares_are_exact_and_within_their_limits(bands: list[tuple[float, int]], fraction: float) -> None:
    weights, limits = zip(*bands, strict=True)
    total, count = int(fraction * sum(limits)), len(limits)
    shares = methods.shares(weights, limits, total)
    assert sum(shares) == total
    assert all(0 <= share <= limit for share, limit in zip(shares, limits, strict=True))
    assert methods.shares([1.0] * count, [1000] * count, 100 * count) == [100] * count


def test_equal_things_at_two_places_are_both_kept() -> None:
    """Only one of equal tokens was kept, so things were miscounted. Equal tokens far apart must both stay."""
    image = reduction_input(8, 8, width=64)
    things = torch.nn.functional.normalize(
        torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), dim=1
    )
    embeds = torch.ones(64, 64) / 8
    embeds[0], embeds[7], embeds[63] = things[0], things[0], things[1]
    kept = reducer("dpp").reduce(replace(image, embeds=embeds), 12).index.tolist()
    assert {0, 7, 63} <= set(kept)
    line = reducer("dpp").reduce(replace(image, embeds=embeds, grid=(1, 64)), 3).index.tolist()
    assert len({0, 7} & set(line)) == 1, "without places one is enough"


@pytest.mark.parametrize("name", ["dpp", "dpp_query"])
def test_large_images_are_chosen_from_band_by_band(name: str) -> None:
    """Comparing all of 4,096 tokens took five seconds, during which no other request got a token."""
    image = reduction_input(60, 60, width=32)
    assert methods.MAX_COMPARED < 60 * 60
    index = reducer(name).reduce(image, 1777).index
    assert len(index.unique()) == 1777
    per_band = torch.bincount(index // methods.BAND)
    assert len(per_band) == -(-3600 // methods.BAND)
    if name == "dpp":
        rows = methods.weighted_rows(image.embeds[: methods.BAND], None)
        places = methods.cells(image.grid, rows.device)[: methods.BAND]
        first = methods.choose_greedily(methods.dpp_kernel(rows, places), int(per_band[0]))
        assert index[: per_band[0]].tolist() == sorted(first.tolist())
        assert int(per_band[:-1].max() - per_band[:-1].min()) <= 1


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_blank_image(value: float) -> None:
    image = replace(reduction_input(6, 7), embeds=torch.full((42, 12), value))
    for name in ("dpp", "dpp_query", "dart", "dart_query"):
        assert len(reducer(name).reduce(image, 17).index.unique()) == 17


def test_tokens_that_are_relevant_to_the_words_come_first() -> None:
    image = reduction_input(6, 7, width=32)
    assert image.query is not None
    near = [3, 20, 41]
    image.embeds[near] = image.query[:3]
    assert sorted(methods.relevance(image.embeds, image.query).topk(3).indices.tolist()) == near
    assert set(near) <= set(reducer("dpp_query").reduce(image, 6).index.tolist())


def test_fastv_keeps_the_tokens_with_the_most_attention() -> None:
    image = reduction_input(6, 7)
    assert image.probe is not None
    scores = torch.zeros(42)
    scores[[5, 30, 12]] = torch.tensor([0.2, 0.5, 0.3])
    with_scores = replace(image, probe=replace(image.probe, scores=scores))
    assert reducer("fastv").reduce(with_scores, 1).index.tolist() == [30]
    assert reducer("fastv").reduce(with_scores, 3).index.tolist() == [5, 12, 30]
    assert reducer("fastv").reduce(with_scores, 5).index.tolist() == [0, 1, 5, 12, 30]
