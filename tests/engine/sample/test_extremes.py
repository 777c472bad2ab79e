"""Extreme parameters and broken rows: a valid token always comes out, and no other request notices."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from fovea.core.errors import InvalidRequest
from fovea.core.sampling import SamplingParams
from fovea.engine.job import SampledToken
from fovea.engine.sample import sampler as module
from fovea.engine.sample.sampler import LOWEST_LOGPROB, Sampler
from fovea.engine.sequence import Sequence
from tests.support.sampling import sample as sample_rows
from tests.support.thorough import examples

SIZE = 12
EOS = 3
NAN, INF = math.nan, math.inf
VALUES = [NAN, INF, -INF, 3.4e38, -3.4e38, 1e30, -1e30, 0.0, -0.0, 1e-45, 5.0, -5.0, 5.0]
TOKENS = st.integers(0, SIZE - 1)
ROWS = st.lists(st.sampled_from(VALUES), min_size=SIZE, max_size=SIZE)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 5e-324, 1e-300, 1e-30, 0.7, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, SIZE, 2**31]),
        "top_p": st.sampled_from([5e-324, 1e-300, 0.5, 1 - 1e-12, 1.0]),
        "min_p": st.sampled_from([0.0, 5e-324, 1e-300, 0.1, 1.0]),
        "repetition_penalty": st.sampled_from([0.01, 0.5, 1.0, 10.0]),
        "presence_penalty": st.sampled_from([-2.0, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 2.0]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, 100.0])),
        "min_tokens": st.sampled_from([0, 9]),
        "stop_token_ids": st.one_of(
            st.lists(TOKENS, max_size=SIZE).map(tuple), st.just(tuple(range(SIZE))), st.just((2**31,))
        ),
        "seed": st.sampled_from([-(2**63), 0, 2**63 - 1]),
        "logprobs": st.just(True),
    },
)
POINTS = st.sampled_from([0.0, 0.5, 1 - 2**-53])


class Points:
    """A random stream of one number."""

    def __init__(self, point: float) -> None:
        self.point = point

    def random(self) -> float:
        return self.point


def sequence(name: str, params: dict[str, Any], output: list[int]) -> Sequence:
    top = {"top_logprobs": 20} if params.get("logprobs") else {}
    seq = Sequence(name, [1, 2, 2], SamplingParams(**params, **top), 99)
    seq.append(output)
    return seq


def sample(
    rows: list[list[float]], sequences: list[Sequence], *, batched: bool, point: float = 0.5
) -> list[SampledToken | Exception]:
    # 999 is an end token outside the vocabulary, as some checkpoints have it.
    sampler = Sampler(frozenset({EOS, 999}), batched=batched)
    for seq in sequences:
        sampler.add(seq, 0)
        sampler._streams[seq.id]._random = Points(point)  # type: ignore[assignment]
    return sample_rows(sampler, torch.tensor(rows), sequences)


@settings(max_examples=examples(400), deadline=None)
@example(
    row=[5.0, -5.0] * 6,
    params={"temperature": 1.0, "repetition_penalty": 0.01, "min_p": 0.1},
    output=[],
    point=0.5,
    batched=False,
)
@example(row=[NAN] * SIZE, params={}, output=[], point=0.5, batched=True)
@example(
    row=[5.0] * SIZE,
    params={"min_tokens": 9, "stop_token_ids": tuple(range(4, SIZE))},
    output=[],
    point=1 - 2**-53,
    batched=False,
)
@given(
    row=ROWS,
    params=PARAMS,
    output=st.lists(TOKENS, max_size=4),
    point=POINTS,
    batched=st.booleans(),
)
def test_a_valid_token_always_comes_out(
    row: list[float], params: dict[str, Any], output: list[int], point: float, batched: bool
) -> None:
    """A request with repetition_penalty 1e-300 and min_p 0.1 had no candidate left.

    The penalty made logits infinite, the softmax made them NaN, and the sampler raised IndexError. It failed
    the whole step, and after ten of them the engine ended.
    """
    seq = sequence("s", params, output)
    (pick,) = sample([row], [seq], batched=batched, point=point)
    assert isinstance(pick, SampledToken), pick
    assert 0 <= pick.token < SIZE
    forbidden = {EOS, *seq.sampling.stop_token_ids} if len(output) < seq.sampling.min_tokens else set()
    if not forbidden >= set(range(SIZE)):
        assert pick.token not in forbidden
    if seq.sampling.logprobs:
        values = [pick.logprob, *(value for _, value in pick.top)]
        assert all(value is not None and math.isfinite(value) for value in values), "JSON has no NaN"


@settings(max_examples=examples(150), deadline=None)
@given(
    crowd=st.lists(st.tuples(ROWS, PARAMS), min_size=1, max_size=4),
    params=PARAMS,
    place=st.integers(0, 4),
)
def test_extreme_neighbours_change_nothing(
    crowd: list[tuple[list[float], dict[str, Any]]], params: dict[str, Any], place: int
) -> None:
    row = torch.randn(SIZE, generator=torch.Generator().manual_seed(place)).tolist()
    mine = sequence("mine", params, [5])
    (alone,) = sample([row], [mine], batched=False)
    sequences = [sequence(f"n{i}", each, []) for i, (_, each) in enumerate(crowd)]
    rows = [other for other, _ in crowd]
    place = min(place, len(crowd))
    sequences.insert(place, mine)
    rows.insert(place, row)
    assert sample(rows, sequences, batched=False)[place] == alone


def test_a_forbidden_token_at_the_end_is_not_drawn_by_rounding() -> None:
    """The largest random number times the total may be rounded up to the total, past the last candidate.

    The last id was drawn then, also if min_tokens forbade it.
    """
    row = [1.0, 2.0, *[0.0] * (SIZE - 2)]
    seq = sequence("s", {"min_tokens": 9, "stop_token_ids": (SIZE - 2, SIZE - 1)}, [])
    (pick,) = sample([row], [seq], batched=False, point=1 - 2**-53)
    assert isinstance(pick, SampledToken)
    assert pick.token == SIZE - 3


def test_if_the_model_wants_only_forbidden_tokens_another_one_comes() -> None:
    row = [-INF] * SIZE
    row[EOS] = 5.0
    (pick,) = sample([row], [sequence("s", {"min_tokens": 9, "temperature": 0}, [])], batched=False)
    assert isinstance(pick, SampledToken)
    assert pick.token != EOS


@pytest.mark.parametrize("batched", [False, True])
def test_an_error_in_one_row_leaves_the_other_rows_alone(
    batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row that raised failed all sequences of its step."""

    name = "choose_draw" if batched else "distribution"
    original = getattr(module, name)

    def broken(*args: Any) -> Any:
        if any(isinstance(arg, SamplingParams) and arg.seed == 13 for arg in args):
            raise IndexError("no candidate")
        return original(*args)

    monkeypatch.setattr(module, name, broken)
    rows = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1)).tolist()
    sequences = [sequence(f"s{seed}", {"seed": seed, "logprobs": True}, []) for seed in (1, 13, 2)]
    first, bad, last = sample(rows, sequences, batched=batched)
    assert isinstance(bad, IndexError)
    assert [first] == sample(rows[:1], sequences[:1], batched=batched)
    assert [last] == sample(rows[2:], sequences[2:], batched=batched)


@pytest.mark.parametrize("batched", [False, True])
def test_a_token_that_is_sampled_again_gets_the_same_random_number(batched: bool) -> None:
    """After a failed step its tokens are sampled again. A second draw would change the text of a seed."""
    rows = torch.zeros(1, 4000)
    sampler = Sampler(frozenset(), batched=batched)
    seq = sequence("s", {"seed": 5}, [])
    sampler.add(seq, 0)
    first, second = sample_rows(sampler, rows, [seq]), sample_rows(sampler, rows, [seq])
    assert first == second
    seq.append([1])
    assert sample_rows(sampler, rows, [seq]) != first


def test_the_penalty_of_the_attack_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="repetition_penalty"):
        SamplingParams(temperature=1, repetition_penalty=1e-300, min_p=0.1)
    assert LOWEST_LOGPROB < -1000
