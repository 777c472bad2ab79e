"""Draws for many rows at once, against draws row by row."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fovea.core.sampling import SamplingParams
from fovea.engine.sample import sampler as module
from fovea.engine.sample.batch import draw
from fovea.engine.sample.logits import NUCLEUS_GUESS, distribution
from fovea.engine.sample.sampler import SampledToken, Sampler
from fovea.engine.sequence import Sequence

EOS = 3
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-300, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 7, 5000]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
    }
)


def logits(rows: int, size: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def sampled(rows: torch.Tensor, params: list[dict[str, Any]], *, batched: bool) -> list[SampledToken]:
    sampler = Sampler(frozenset({EOS}), batched=batched)
    sequences = [Sequence(f"s{i}", [1, 2], SamplingParams(**each), 9) for i, each in enumerate(params)]
    for seq in sequences:
        sampler.add(seq, 0)
    return sampler.sample(rows, sequences)


@settings(max_examples=150, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=6),
    size=st.sampled_from([1, 50, 3000]),
    seed=st.integers(0, 1000),
)
def test_tokens_are_those_of_rows_by_themselves(params: list[dict[str, Any]], size: int, seed: int) -> None:
    """Unless the point falls on the very border between two candidates, where rounding decides: one in a hundred thousand."""
    rows = logits(len(params), size, seed)
    asked = [{**each, "seed": seed + number} for number, each in enumerate(params)]
    together, alone = sampled(rows, asked, batched=True), sampled(rows, asked, batched=False)
    for row, each, ours, theirs in zip(rows, asked, together, alone, strict=True):
        if ours != theirs:
            ids, p = distribution(row, SamplingParams(**each))
            order = ids.tolist()
            places = sorted((order.index(ours.token), order.index(theirs.token)))
            assert float(p[places[0] + 1 : places[1]].sum()) < 1e-5, "more than a border lies between them"


def test_every_candidate_of_a_row_is_reached_by_its_share_of_points() -> None:
    params = SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.02)
    row = logits(1, 60, 1)[0]
    ids, probabilities = distribution(row, params)
    count = 4000
    points = [(i + 0.5) / count for i in range(count)]
    tokens, sure = draw(row.repeat(count, 1), [params] * count, points)
    assert bool(sure.all())
    shares = torch.bincount(tokens, minlength=60)[ids] / count
    torch.testing.assert_close(shares, probabilities, atol=2 / count, rtol=0)


def test_a_flat_row_says_that_the_candidates_are_not_all_and_is_drawn_again() -> None:
    rows = torch.stack((torch.zeros(4 * NUCLEUS_GUESS), logits(1, 4 * NUCLEUS_GUESS, 2)[0] * 3))
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.9)]
    _, sure = draw(rows, params, [0.7, 0.7])
    assert sure.tolist() == [False, True]
    asked = [{"top_p": 0.9, "seed": 5}, {"top_p": 0.9, "seed": 6}]
    picks = sampled(rows, asked, batched=True)
    assert picks == sampled(rows, asked, batched=False)
    assert picks[0].token >= NUCLEUS_GUESS or picks[0] == sampled(rows[:1], asked[:1], batched=True)[0]


@pytest.mark.parametrize("params", [{"top_k": 4 * NUCLEUS_GUESS}, {"min_p": 1e-9}], ids=str)
def test_a_filter_wider_than_the_candidates_is_not_trusted(params: dict[str, Any]) -> None:
    _, sure = draw(torch.zeros(1, 4 * NUCLEUS_GUESS), [SamplingParams(**params)], [0.5])
    assert sure.tolist() == [False]


def test_rows_with_penalties_or_logprobs_are_drawn_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """And from the same stream: what a request says does not depend on how it is drawn."""
    counts: list[int] = []

    def noted(rows: torch.Tensor, *rest: Any) -> Any:
        counts.append(len(rows))
        return draw(rows, *rest)

    monkeypatch.setattr(module, "draw", noted)
    rows = logits(5, 50, 3)
    params: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2, "logprobs": True, "top_logprobs": 2},
        {"seed": 3, "repetition_penalty": 1.5},
        {"seed": 4, "min_tokens": 2, "top_k": 3},
        {"temperature": 0},
    ]
    together = sampled(rows, params, batched=True)
    assert counts == [1]
    assert [pick.token for pick in together] == [pick.token for pick in sampled(rows, params, batched=False)]


def test_the_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at a number on a card waits for it; a step of plain draws looks at all of its tokens together."""
    looks: list[str] = []
    for name in ("tolist", "item", "__int__", "__float__", "__bool__"):
        kept = getattr(torch.Tensor, name)

        def seen(self: torch.Tensor, *, name: str = name, kept: Any = kept) -> Any:
            looks.append(name)
            return kept(self)

        monkeypatch.setattr(torch.Tensor, name, seen)
    params: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2, "top_p": 0.9},
        {"temperature": 0},
        {"seed": 3, "top_k": 4},
    ]
    sampled(logits(4, 50, 3), params, batched=True)
    assert looks == ["tolist"]
