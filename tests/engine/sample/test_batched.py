"""Tokens of many rows at once, compared with those row by row, and the waits for the device."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any
from unittest.mock import Mock, patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fovea.core.sampling import LOWEST_LOGPROB, SamplingParams
from fovea.engine.grammar.guide import Masks
from fovea.engine.job import SampledToken
from fovea.engine.sample import batch as module
from fovea.engine.sample import sampler as sampler_module
from fovea.engine.sample.batch import IN_PROMPT, Draw, TokenCounts, draw, parameters, unpack
from fovea.engine.sample.logits import NUCLEUS_GUESS, distribution, repair
from fovea.engine.sample.sampler import Sampler
from fovea.engine.sequence import Sequence
from fovea.engine.step.executor import StepResult
from fovea.kernels import transfer
from fovea.kernels.transfer import HostCopy, to_device, upload
from tests.support.host_reads import no_host_reads
from tests.support.sampling import mix, start, step
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


def drawn(rows: torch.Tensor, params: list[SamplingParams], points: Seq[float]) -> tuple[Any, Any]:
    table = torch.tensor([parameters(*pair) for pair in zip(params, points, strict=True)])
    return draw(rows, table, Draw.GUESSED)


def test_candidates_are_drawn_by_their_probability() -> None:
    params = SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.02)
    row = logits(1, 60, 1)[0]
    ids, probabilities = distribution(row, params)
    count = 4000
    points = [(i + 0.5) / count for i in range(count)]
    tokens, sure = drawn(row.repeat(count, 1), [params] * count, points)
    assert bool(sure.all())
    shares = torch.bincount(tokens, minlength=60)[ids] / count
    torch.testing.assert_close(shares, probabilities, atol=2 / count, rtol=0)


def test_a_flat_row_is_unsure_and_is_drawn_again() -> None:
    rows = torch.stack((torch.zeros(4 * NUCLEUS_GUESS), logits(1, 4 * NUCLEUS_GUESS, 2)[0] * 3))
    _, sure = drawn(rows, [SamplingParams(top_p=0.9)] * 2, [0.7, 0.7])
    assert sure.tolist() == [False, True]
    seeded = [{"top_p": 0.9, "seed": 5}, {"top_p": 0.9, "seed": 6}]
    picks = sample(rows, seeded, batched=True)
    assert picks == sample(rows, seeded, batched=False)


@pytest.mark.parametrize("params", [{"top_k": 4 * NUCLEUS_GUESS}, {"min_p": 1e-9}], ids=str)
def test_a_filter_wider_than_the_candidates_is_unsure(params: dict[str, Any]) -> None:
    _, sure = drawn(torch.zeros(1, 4 * NUCLEUS_GUESS), [SamplingParams(**params)], [0.5])
    assert sure.tolist() == [False]


SIZE = 60
TOKENS = st.integers(0, SIZE - 1)
IDS = st.lists(TOKENS, min_size=1, max_size=6).map(tuple)
EVERYTHING = st.fixed_dictionaries(
    {"seed": st.integers(0, 99)},
    optional={
        "temperature": st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([1, 7, 2**31]),
        "top_p": st.sampled_from([0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.05, 1.0]),
        "repetition_penalty": st.sampled_from([0.01, 0.7, 1.3, 10.0]),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(TOKENS, st.floats(-100, 100), max_size=5),
        "allowed_token_ids": IDS,
        "stop_token_ids": st.one_of(IDS, st.just((2**31,)), st.just(tuple(range(SIZE)))),
        "min_tokens": st.sampled_from([0, 3, 9]),
        "logprobs": st.just(True),
        "top_logprobs": st.sampled_from([0, 1, 5, 20]),
    },
).map(lambda params: params if params.get("logprobs") else {**params, "top_logprobs": 0})
REQUESTS = st.fixed_dictionaries(
    {
        "params": EVERYTHING | st.sampled_from([{"temperature": 0.0}, {"seed": 3}]),
        "prompt": st.lists(st.integers(0, SIZE + 3), min_size=1, max_size=5),
        "output": st.lists(TOKENS, max_size=5),
        "drafts": st.lists(TOKENS, max_size=3),
        "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=2), max_size=3),
        "allowed": st.none() | st.sets(TOKENS, min_size=1, max_size=9),
        "broken": st.sampled_from([None] * 5 + ["nan", "inf", "-inf", "all nan", "all inf", "all -inf"]),
    }
)


def row_of(seed: int, broken: str | None) -> torch.Tensor:
    row = logits(1, SIZE, seed)[0]
    if broken is not None:
        value = float(broken.removeprefix("all "))
        if broken.startswith("all "):
            row[:] = value
        else:
            row[seed % 7 :: 7] = value
    return row


class Distributions:
    """Notes the adjusted logits of tokens that are drawn row by row, by the parameters of their request."""

    def __init__(self) -> None:
        self.rows: dict[int, list[torch.Tensor]] = {}

    def __call__(self, row: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
        self.rows.setdefault(id(params), []).append(row)
        return distribution(row, params)

    def decided_by_rounding(self, params: SamplingParams, number: int, ours: int, theirs: int) -> bool:
        """Whether two tokens are equally likely, or only a border lies between them."""
        row = self.rows[id(params)][number]
        ids, p = distribution(row, params)
        order = ids.tolist()
        if row[ours] == row[theirs] or not row.max() > -math.inf:
            return True
        places = sorted((order.index(ours), order.index(theirs)))
        return float(p[places[0] + 1 : places[1]].sum()) < 1e-5


def check_logprobs(row: torch.Tensor, ours: SampledToken, theirs: SampledToken) -> None:
    """Compare log probabilities. Of tokens that are equally likely, any may be among the top."""
    own = repair(row).log_softmax(-1).clamp(min=LOWEST_LOGPROB)
    assert (ours.logprob is None) == (theirs.logprob is None)
    if ours.logprob is not None:
        assert ours.logprob == pytest.approx(float(own[ours.token]), abs=1e-4, rel=1e-5)
        values = [value for _, value in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx(values, abs=1e-4, rel=1e-5)
        assert [float(own[token]) for token, _ in ours.top] == pytest.approx(values, abs=1e-4, rel=1e-5)


@settings(max_examples=examples(600), deadline=None)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=6),
    seed=st.integers(0, 999),
    steps=st.integers(1, 3),
    guess=st.sampled_from([4, 16, NUCLEUS_GUESS]),
    part=st.sampled_from([2, 64]),
)
def test_a_batch_of_anything_gives_the_tokens_of_single_rows(
    requests: list[dict[str, Any]], seed: int, steps: int, guess: int, part: int
) -> None:
    """Greedy tokens are equal. Drawn ones may differ only where rounding decides, or between equal logits.

    guess: number of candidates that are tried first. part: number of rows that are computed together.
    """
    (together, rows), (alone, twins) = start(requests, batched=True), start(requests, batched=False)
    broken = {f"s{i}": each["broken"] for i, each in enumerate(requests)}
    for number in range(steps):
        x = torch.stack([row_of(seed + 10 * number + i, broken[row[0].id]) for i, row in enumerate(rows)])
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, "NUCLEUS_GUESS", guess)
            patched.setattr(module, "ROWS", part)
            ours = step(together, rows, x)
            noted = Distributions()
            patched.setattr(sampler_module, "distribution", noted)
            theirs = step(alone, twins, x)
        assert ours.failures == theirs.failures == {}
        for i, ((seq, drafts), (twin, _)) in enumerate(zip(rows, twins, strict=True)):
            mine, others = ours.sampled[seq.id], theirs.sampled[seq.id]
            if drafts >= min(len(mine), len(others)):
                continue
            if [pick.token for pick in mine[:drafts]] != [pick.token for pick in others[:drafts]]:
                continue
            if mine[drafts].token != others[drafts].token:
                assert not seq.sampling.greedy
                tokens = mine[drafts].token, others[drafts].token
                assert noted.decided_by_rounding(twin.sampling, drafts, *tokens)
            check_logprobs(x[i], mine[drafts], others[drafts])
        for seq, _ in dict.fromkeys((row[0], 0) for row in (*rows, *twins)):
            seq.append([pick.token for pick in theirs.sampled[seq.id]])
            seq.drafts = []
        rows, twins = [row for row in rows if not row[1]], [row for row in twins if not row[1]]


@pytest.mark.parametrize("broken", [None, "nan", "inf", "-inf", "all nan", "all inf", "all -inf"])
def test_greedy_tokens_of_broken_rows_and_of_repeated_tokens_are_those_of_single_rows(
    broken: str | None,
) -> None:
    penalties = {"temperature": 0, "repetition_penalty": 1.1, "frequency_penalty": 0.3}
    requests = [
        {
            "params": params,
            "prompt": [8, 8],
            "output": [8] * 9,
            "drafts": [],
            "bad_words": [],
            "allowed": allowed,
        }
        for allowed in (None, set(range(30)))
        for params in ({"temperature": 0}, {"temperature": 0, "logprobs": True, "top_logprobs": 3}, penalties)
    ]
    results = []
    for batched in (True, False):
        sampler, rows = start(requests, batched=batched)
        x = torch.stack([row_of(5, broken)] * len(rows))
        x[:, 8] = x[0].max() + 2.5  # most likely, unless it is penalized for each time that it occurred
        results.append(step(sampler, rows, x))
    for name, (theirs,) in results[1].sampled.items():
        (ours,) = results[0].sampled[name]
        assert ours.token == theirs.token
        check_logprobs(x[0], ours, theirs)


def watch(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Return lists that get the size of each read of the device, and of each copy to it."""
    reads: list[int] = []
    copies: list[int] = []
    tolist = torch.Tensor.tolist

    def read(copy: HostCopy) -> list[float]:
        values: list[float] = tolist(copy._values)
        reads.append(len(values))
        return values

    def copy(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        copies.append(values.numel())
        return to_device(values, device)

    monkeypatch.setattr(HostCopy, "read", read)
    monkeypatch.setattr(transfer, "to_device", copy)
    return reads, copies


def test_a_step_of_any_rows_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a number from a GPU, and a copy from memory that is not pinned, wait for all launched work."""
    reads, copies = watch(monkeypatch)
    sampler, rows = start(mix(), batched=True)
    x = logits(len(rows), SIZE, 1)
    result = StepResult()
    with no_host_reads():
        pending = sampler.launch(x, rows)
        assert (len(reads), len(copies)) == (0, 1)
        pending.finish(result)
    assert (len(reads), len(copies)) == (1, 1)
    twin, twins = start(mix(), batched=False)
    expected = step(twin, twins, x)
    assert {name: [pick.token for pick in picks] for name, picks in result.sampled.items()} == {
        name: [pick.token for pick in picks] for name, picks in expected.sampled.items()
    }
    for i, (seq, drafts) in enumerate(rows):
        if drafts < len(result.sampled[seq.id]):
            assert pending.final[i]
            assert int(pending.tokens[i]) == result.sampled[seq.id][drafts].token


def test_only_incomplete_candidates_need_a_second_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, _ = watch(monkeypatch)
    requests = mix()
    for seed, params in enumerate(
        ({"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 9, "top_p": 0.9}, {"top_k": 3000})
    ):
        requests.append(requests[1] | {"params": {"seed": 5 + seed, "logprobs": True} | params, "drafts": []})
    sampler, rows = start(requests, batched=True)
    x = torch.zeros(len(rows), 3 * NUCLEUS_GUESS)
    with no_host_reads():
        pending = sampler.launch(x, rows)
        pending.finish(StepResult())
    assert len(reads) == 2
    unsure = {seq.sampling.seed for (seq, _), final in zip(rows, pending.final, strict=True) if not final}
    assert unsure == {2, 5, 6}


def test_a_sequence_may_be_removed_before_its_tokens_are_read() -> None:
    sampler, rows = start(
        [{**mix()[0], "params": {"seed": 1, "top_p": 0.9, **each}} for each in ({}, {"presence_penalty": 1})],
        batched=True,
    )
    pending = sampler.launch(torch.zeros(2, 3 * NUCLEUS_GUESS), rows)
    for seq, _ in rows:
        sampler.remove(seq)
    pending.finish(StepResult())
    assert not sampler._counts._rows


def test_steps_of_greedy_rows_copy_nothing_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, copies = watch(monkeypatch)
    sampler, rows = start([mix()[0]] * 3, batched=True)
    with no_host_reads():
        sampler.sample(logits(3, SIZE, 1), rows, StepResult())
    assert (len(reads), len(copies)) == (1, 0)


def test_copies_between_host_and_cuda_are_pinned_and_wait_for_nothing_else() -> None:
    values = Mock(device=torch.device("cuda"), shape=(3,), dtype=torch.float64)
    assert to_device(values, values.device) is values.pin_memory().to.return_value
    values.pin_memory().to.assert_called_once_with(values.device, non_blocking=True)
    with patch.object(torch, "empty") as empty, patch.object(torch, "cuda") as cuda:
        copy = HostCopy(values)
        empty.assert_called_once_with((3,), dtype=torch.float64, pin_memory=True)
        empty().copy_.assert_called_once_with(values, non_blocking=True)
        cuda.Event().record.assert_called_once_with(cuda.current_stream(values.device))
        cuda.Event().synchronize.assert_not_called()
        assert copy.read() is empty().tolist.return_value
        cuda.Event().synchronize.assert_called_once_with()


def test_arrays_arrive_as_they_are() -> None:
    arrays = [
        np.arange(3), np.zeros((0, 4), dtype=np.int32), np.array([[1.5, 2.5, -0.0]], dtype=np.float32),
        np.array([[1, -2], [3, 4]], dtype=np.int32), np.zeros(0, dtype=np.float32), np.array([-(2**62)]),
    ]  # fmt: skip
    for array, tensor in zip(arrays, upload(arrays, torch.device("cpu")), strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype


@given(size=st.integers(1, 100), rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_masks_are_unpacked_as_on_the_host(size: int, rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    words = random.integers(-(2**31), 2**31, (rows, -(-size // 32))).astype(np.int32)
    masks = Masks.of(list(enumerate(words)), size)
    assert unpack(torch.from_numpy(masks.bits), size).tolist() == masks.allowed(size).tolist()


def test_counts_of_tokens_are_bounded_and_freed_with_their_sequences() -> None:
    counts, x = TokenCounts(), torch.zeros(1, SIZE)
    sequences = [Sequence(f"s{i}", [1, 1, SIZE], SamplingParams(repetition_penalty=2.0), 9) for i in range(9)]

    def update(*chosen: Sequence) -> list[list[int]]:
        rows = torch.tensor([counts.row(seq.id, x) for seq in chosen])
        for seq in chosen:
            counts.add([seq], *map(torch.from_numpy, counts.unread(seq)))
        return [[value for value in row if value] for row in counts.of(rows).tolist()]

    for seq in sequences:
        seq.append([1, 2, 2])
        assert update(seq) == [[IN_PROMPT + 1, 2]]
    for seq in sequences[1:]:
        counts.remove(seq.id)
    sequences[0].append([2])
    assert update(sequences[0], sequences[5]) == [[IN_PROMPT + 1, 3], [IN_PROMPT + 1, 2]]
    assert counts._table.shape == (16, SIZE)
    counts.remove("s0")
    counts.remove("s5")
    assert counts._table.numel() == len(counts._rows) == 0


def test_an_id_outside_the_logits_fails_its_request_alone() -> None:
    """On a GPU such an index would end every request: CUDA allows no further work after it."""
    for params in ({"logit_bias": {50: 1.0}}, {"allowed_token_ids": (3, 50)}):
        sampler = Sampler(frozenset(), batched=True)
        requests: list[dict[str, Any]] = [{}, params, {}]
        sequences = [Sequence(f"s{i}", [1], SamplingParams(**each), 9) for i, each in enumerate(requests)]
        for seq in sequences:
            sampler.add(seq, 0)
        first, bad, last = sample_rows(sampler, logits(3, 50, 3), sequences)
        assert isinstance(bad, IndexError)
        assert isinstance(first, SampledToken)
        assert isinstance(last, SampledToken)
