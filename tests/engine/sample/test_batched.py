"""Draws for many rows at once, compared with draws row by row."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fovea.core.sampling import SamplingParams
from fovea.engine.job import SampledToken
from fovea.engine.sample import sampler as module
from fovea.engine.sample.logits import NUCLEUS_GUESS, distribution, draw
from fovea.engine.sample.sampler import Sampler
from fovea.engine.sequence import Sequence
from tests.support.sampling import sample as sample_rows
from tests.support.thorough import examples

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


def sample(rows: torch.Tensor, params: list[dict[str, Any]], *, batched: bool) -> list[SampledToken]:
    sampler = Sampler(frozenset({EOS}), batched=batched)
    sequences = [Sequence(f"s{i}", [1, 2], SamplingParams(**each), 9) for i, each in enumerate(params)]
    for seq in sequences:
        sampler.add(seq, 0)
    picks = sample_rows(sampler, rows, sequences)
    assert not [pick for pick in picks if isinstance(pick, Exception)]
    return [pick for pick in picks if isinstance(pick, SampledToken)]


@settings(max_examples=examples(150), deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=6),
    size=st.sampled_from([1, 50, 3000]),
    seed=st.integers(0, 1000),
)
def test_batched_draws_equal_single_draws(params: list[dict[str, Any]], size: int, seed: int) -> None:
    """Tokens may differ only if the random number is at the border of two candidates, where rounding decides.

    That is one draw in a hundred thousand.
    """
    rows = logits(len(params), size, seed)
    seeded = [{**each, "seed": seed + number} for number, each in enumerate(params)]
    together, alone = sample(rows, seeded, batched=True), sample(rows, seeded, batched=False)
    for row, each, ours, theirs in zip(rows, seeded, together, alone, strict=True):
        if ours != theirs:
            ids, p = distribution(row, SamplingParams(**each))
            order = ids.tolist()
            places = sorted((order.index(ours.token), order.index(theirs.token)))
            assert float(p[places[0] + 1 : places[1]].sum()) < 1e-5, "more than a border lies between them"


def test_candidates_are_drawn_by_their_probability() -> None:
    params = SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.02)
    row = logits(1, 60, 1)[0]
    ids, probabilities = distribution(row, params)
    count = 4000
    points = [(i + 0.5) / count for i in range(count)]
    tokens, sure = draw(row.repeat(count, 1), [params] * count, points)
    assert bool(sure.all())
    shares = torch.bincount(tokens, minlength=60)[ids] / count
    torch.testing.assert_close(shares, probabilities, atol=2 / count, rtol=0)


def test_a_flat_row_is_unsure_and_is_drawn_again() -> None:
    rows = torch.stack((torch.zeros(4 * NUCLEUS_GUESS), logits(1, 4 * NUCLEUS_GUESS, 2)[0] * 3))
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.9)]
    _, sure = draw(rows, params, [0.7, 0.7])
    assert sure.tolist() == [False, True]
    seeded = [{"top_p": 0.9, "seed": 5}, {"top_p": 0.9, "seed": 6}]
    picks = sample(rows, seeded, batched=True)
    assert picks == sample(rows, seeded, batched=False)
    assert picks[0].token >= NUCLEUS_GUESS or picks[0] == sample(rows[:1], seeded[:1], batched=True)[0]


@pytest.mark.parametrize("params", [{"top_k": 4 * NUCLEUS_GUESS}, {"min_p": 1e-9}], ids=str)
def test_a_filter_wider_than_the_candidates_is_unsure(params: dict[str, Any]) -> None:
    _, sure = draw(torch.zeros(1, 4 * NUCLEUS_GUESS), [SamplingParams(**params)], [0.5])
    assert sure.tolist() == [False]


def test_rows_with_penalties_or_logprobs_are_drawn_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use the same random stream, so an answer does not depend on how its tokens are drawn."""
    counts: list[int] = []

    def counting_draw(rows: torch.Tensor, *rest: Any) -> Any:
        counts.append(len(rows))
        return draw(rows, *rest)

    monkeypatch.setattr(module, "draw", counting_draw)
    rows = logits(5, 50, 3)
    params: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2, "logprobs": True, "top_logprobs": 2},
        {"seed": 3, "repetition_penalty": 1.5},
        {"seed": 4, "min_tokens": 2, "top_k": 3},
        {"temperature": 0},
    ]
    together = sample(rows, params, batched=True)
    assert counts == [1]
    assert [pick.token for pick in together] == [pick.token for pick in sample(rows, params, batched=False)]


def test_a_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a number from a GPU waits for all launched work, so a step of plain draws reads only once."""
    reads: list[str] = []
    for name in ("tolist", "item", "__int__", "__float__", "__bool__"):
        original = getattr(torch.Tensor, name)

        def record(self: torch.Tensor, *, name: str = name, original: Any = original) -> Any:
            reads.append(name)
            return original(self)

        monkeypatch.setattr(torch.Tensor, name, record)
    params: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2, "top_p": 0.9},
        {"temperature": 0},
        {"seed": 3, "top_k": 4},
    ]
    sample(logits(4, 50, 3), params, batched=True)
    assert reads == ["tolist"]
