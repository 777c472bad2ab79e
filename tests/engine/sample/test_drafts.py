"""Rows with drafts before them: the tokens are those of single steps, whatever the drafts are."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from fovea.core.sampling import SamplingParams
from fovea.engine.job import SampledToken
from fovea.engine.sample.sampler import Sampler
from fovea.engine.sequence import Sequence
from fovea.engine.step.executor import StepResult

SIZE, LENGTH, EOS = 40, 12, 3
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 4},
    {"temperature": 0.7, "seed": 5, "top_p": 0.8, "top_k": 12},
    {"temperature": 1, "seed": 6, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 7, "logprobs": True, "top_logprobs": 2, "min_tokens": 6},
]


def row(output: list[int]) -> torch.Tensor:
    """Logits after an answer, a function of its last tokens."""
    seed = hash(tuple(output[-3:])) % 2**31
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def step(sampler: Sampler, seq: Sequence) -> list[SampledToken]:
    count = len(seq.drafts) + 1
    logits = torch.stack([row(seq.output_ids + seq.drafts[:number]) for number in range(count)])
    result = StepResult()
    sampler.sample(logits, [(seq, number) for number in range(count)], result)
    assert not result.failures
    return list(result.sampled[seq.id])


def generate(params: dict[str, Any], *, batched: bool) -> list[SampledToken]:
    sampler = Sampler(frozenset({EOS}), batched=batched)
    seq = Sequence("s", [1, 2], SamplingParams(**params), 99)
    sampler.add(seq, 0)
    picks: list[SampledToken] = []
    while len(picks) < LENGTH:
        picks += step(sampler, seq)
        seq.append([pick.token for pick in picks][len(seq.output_ids) :])
    return picks


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("params", PARAMS, ids=str)
@given(right=st.lists(st.integers(0, 5), min_size=1, max_size=9), wrong=st.integers(0, 3))
def test_tokens_are_those_of_single_steps(
    params: dict[str, Any], right: list[int], wrong: int, batched: bool
) -> None:
    expected = generate(params, batched=batched)
    tokens = [pick.token for pick in expected]
    sampler = Sampler(frozenset({EOS}), batched=batched)
    seq = Sequence("s", [1, 2], SamplingParams(**params), 99)
    sampler.add(seq, 0)
    picks: list[SampledToken] = []
    steps = 0
    while len(picks) < LENGTH:
        at = len(picks)
        good = tokens[at : at + right[steps % len(right)]]
        follower = tokens[at + len(good)] if at + len(good) < len(tokens) else 0
        seq.drafts = good + [(follower + 1) % SIZE] * wrong
        new = step(sampler, seq)
        assert len(new) == len(good) + 1 or at + len(new) > LENGTH
        picks += new
        seq.append([pick.token for pick in picks][len(seq.output_ids) :])
        steps += 1
    assert picks[:LENGTH] == expected[:LENGTH]


def test_a_failed_step_that_is_tried_again_gives_the_same_tokens() -> None:
    """The random number of a token is kept: the tokens after accepted drafts were drawn already."""
    params = {"temperature": 1.0, "seed": 4}
    drafts = [pick.token for pick in generate(params, batched=False)][:3]
    sampler = Sampler(frozenset({EOS}))
    seq = Sequence("s", [1, 2], SamplingParams(**params), 99)
    sampler.add(seq, 0)
    seq.drafts = drafts
    assert step(sampler, seq) == step(sampler, seq)
