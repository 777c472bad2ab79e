"""Logits to tokens, compared with the logits processors of transformers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fovea.core.sampling import SamplingParams
from fovea.engine.job import SampledToken
from fovea.engine.sample.logits import NUCLEUS_GUESS, SeenTokens, adjust, distribution
from fovea.engine.sample.sampler import Sampler
from fovea.engine.sequence import Sequence
from tests.support.sampling import sample as sample_rows
from tests.support.thorough import examples

EOS = 3
NONE: frozenset[int] = frozenset()


def logits(seed: int, size: int = 50, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def seq(
    name: str = "s", prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **params: Any
) -> Sequence:
    sequence = Sequence(name, list(prompt), SamplingParams(**params), 100)
    sequence.append(output)
    return sequence


def draw(sampler: Sampler, rows: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    return [pick.token for pick in tokens(sample_rows(sampler, rows, sequences))]


def tokens(picks: list[SampledToken | Exception]) -> list[SampledToken]:
    """The picks, none of which is an error."""
    assert not [pick for pick in picks if isinstance(pick, Exception)]
    return [pick for pick in picks if isinstance(pick, SampledToken)]


def generate(
    seed: int | None, steps: int, *, choice: int = 0, neighbours: int = 0, **params: Any
) -> list[int]:
    """Generate tokens from fixed rows of logits, alone or as the last row of a batch."""
    sampler = Sampler(frozenset({EOS}))
    others = [seq(f"n{i}", seed=i) for i in range(neighbours)]
    mine = seq("mine", seed=seed, **params)
    for other in others:
        sampler.add(other, 0)
    sampler.add(mine, choice)
    for step in range(steps):
        rows = torch.stack([*(logits(1000 + i) for i in range(neighbours)), logits(step)])
        mine.append([draw(sampler, rows, [*others, mine])[-1]])
    return mine.output_ids


def clear_cut(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether no candidate is so close to the edge of a filter that rounding decides on its side."""
    candidates = row.sort(descending=True).values[: top_k or None].softmax(0)
    nucleus = (candidates.cumsum(0)[:-1] - top_p).abs() if top_p < 1 else candidates[:0]
    floor = (candidates[1:] - min_p * candidates[0]).abs() if min_p > 0 else candidates[:0]
    return bool((torch.cat((nucleus, floor)) > 1e-5).all())


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1, 5, 50, 3000]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_candidates_and_probabilities_are_those_of_transformers(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = logits(seed, size)
    assume(clear_cut(row.double() / temperature, top_k, top_p, min_p))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = row[None]
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warp in warpers:
        scores = warp(None, scores)
    theirs = scores.softmax(-1)[0]
    ids, probabilities = distribution(row, params)
    ours = torch.zeros(size).scatter(0, ids, probabilities)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    if top_k or top_p < 1.0 or min_p:
        assert bool((probabilities[:-1] >= probabilities[1:]).all())
    else:
        assert ids.tolist() == list(range(size)), "without a filter nothing is sorted"


def test_a_nucleus_larger_than_the_first_guess_is_complete() -> None:
    """Candidates are first searched among the 1,024 most likely tokens. A flat distribution needs more."""
    row = torch.zeros(4 * NUCLEUS_GUESS)
    ids, probabilities = distribution(row, SamplingParams(top_p=0.9))
    assert len(ids) == pytest.approx(0.9 * row.numel(), abs=2)
    assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-300])
def test_a_temperature_close_to_zero_is_greedy(temperature: float) -> None:
    """1e-300 is a valid temperature but is zero in float32.

    The logits became infinite and their sum NaN, so the last id was drawn.
    """
    row = logits(1)
    assert generate(1, 5, temperature=temperature) == [int(logits(step).argmax()) for step in range(5)]
    ids, probabilities = distribution(row, SamplingParams(temperature=temperature))
    assert int(ids[probabilities.argmax()]) == int(row.argmax())
    assert float(probabilities.max()) == pytest.approx(1.0)


def test_the_repetition_penalty_covers_prompt_and_answer_once() -> None:
    row = logits(5)
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[1, 2, 2, 7, 7]]), row[None].clone())[0]
    seen = SeenTokens([1, 2, 2], len(row), row.device)
    assert seen.update([]).tolist() == [1, 2]
    assert seen.update([7]).tolist() == seen.update([7, 7]).tolist() == [1, 2, 7]
    ours = adjust(row, SamplingParams(repetition_penalty=1.3), seen.update([7, 7]), [7, 7], NONE)
    torch.testing.assert_close(ours, theirs)


def test_presence_counts_once_frequency_counts_each_and_prompts_never() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    row = adjust(torch.zeros(6), params, None, [2, 3, 3, 3], NONE)
    assert row.tolist() == [0, 0, -0.75, -1.25, 0, 0]


def test_bias_comes_before_penalties_and_the_input_row_is_unchanged() -> None:
    row = torch.ones(4)
    params = SamplingParams(logit_bias={0: 3.0, 2: -100.0}, repetition_penalty=2.0)
    assert adjust(row, params, torch.tensor([0]), [], NONE).tolist() == [2.0, 1.0, -99.0, 1.0]
    assert row.tolist() == [1.0] * 4


def test_a_bias_changes_greedy_answers() -> None:
    row = logits(2)
    assert draw(Sampler(NONE), row[None], [seq(temperature=0, logit_bias={11: 100.0})]) == [11]
    best = int(row.argmax())
    assert draw(Sampler(NONE), row[None], [seq(temperature=0, logit_bias={best: -100.0})]) != [best]


def test_no_answer_ends_before_min_tokens() -> None:
    row = torch.zeros(6)
    row[EOS], row[4], row[5] = 9.0, 8.0, 7.0
    sampler = Sampler(frozenset({EOS}))
    params: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (4,)}
    assert draw(sampler, row[None], [seq(output=(), **params)]) == [5]
    assert draw(sampler, row[None], [seq(output=(1,), **params)]) == [5]
    assert draw(sampler, row[None], [seq(output=(1, 1), **params)]) == [EOS]


def test_a_seed_gives_the_same_text_in_every_batch() -> None:
    alone = generate(7, 30)
    assert generate(7, 30, neighbours=5) == alone
    assert generate(8, 30) != alone
    assert len(set(alone)) > 5


def test_choices_of_one_seed_differ_and_are_reproducible() -> None:
    texts = [generate(7, 30, choice=choice) for choice in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    assert texts == [generate(7, 30, choice=choice) for choice in range(3)]


def test_without_a_seed_two_answers_differ() -> None:
    assert generate(None, 40) != generate(None, 40)


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([0.0, 1.0, 2.0, -1.0])
    sampler = Sampler(NONE)
    mine = seq(seed=3)
    sampler.add(mine, 0)
    total = 4000
    for _ in range(total):
        mine.output_ids += draw(sampler, row[None], [mine])
    counts = Counter(mine.output_ids)
    for token, probability in enumerate(row.softmax(0).tolist()):
        spread = (probability * (1 - probability) / total) ** 0.5
        assert counts[token] / total == pytest.approx(probability, abs=5 * spread)


def test_logprobs_are_the_models_own_before_any_adjustment() -> None:
    row = logits(4)
    mine = seq(temperature=0, logprobs=True, top_logprobs=3, logit_bias={17: 100.0}, repetition_penalty=2.0)
    (pick,) = tokens(sample_rows(Sampler(NONE), row[None], [mine]))
    plain = row.log_softmax(0)
    assert pick.token == 17
    assert pick.logprob == pytest.approx(float(plain[17]), abs=1e-5)
    values, ids = plain.topk(3)
    assert [token for token, _ in pick.top] == ids.tolist()
    assert [value for _, value in pick.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_without_alternatives_and_none_at_all() -> None:
    row = logits(4)[None]
    (pick,) = tokens(sample_rows(Sampler(NONE), row, [seq(temperature=0, logprobs=True)]))
    assert pick.logprob is not None
    assert pick.top == ()
    assert sample_rows(Sampler(NONE), row, [seq(temperature=0)]) == [SampledToken(int(row.argmax()))]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_only_allowed_ids_are_chosen(temperature: float) -> None:
    mine = seq(temperature=temperature, seed=1, allowed_token_ids=(4, 9, 17), repetition_penalty=1.5)
    sampler = Sampler(NONE)
    sampler.add(mine, 0)
    for step in range(30):
        mine.output_ids += draw(sampler, logits(step)[None], [mine])
    assert set(mine.output_ids) <= {4, 9, 17}
    assert len(set(mine.output_ids)) > 1


def test_bad_words_never_occur_as_these_tokens() -> None:
    """The tokens alone, and parts of a word of several tokens, may occur."""
    row = torch.zeros(8)
    row[5], row[6], row[7] = 3.0, 2.0, 1.0
    mine = seq(temperature=0)
    sampler = Sampler(NONE)
    sampler.add(mine, 0, bad_words=((5, 5, 5), (6, 6)))
    for _ in range(9):
        mine.output_ids += draw(sampler, row[None], [mine])
    assert mine.output_ids == [5, 5, 6, 5, 5, 6, 5, 5, 6]
    other = seq("other", temperature=0)
    sampler.add(other, 0, bad_words=((5,), (6,)))
    assert draw(sampler, row[None], [other]) == [7]
