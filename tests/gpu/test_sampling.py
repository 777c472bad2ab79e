"""Tokens of a whole step on the GPU: those of single rows on the CPU, with one wait. Run by `make gpu`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fovea.engine.sample.batch import NUCLEUS_GUESS
from fovea.engine.step.executor import StepResult
from tests.support import gpu
from tests.support.sampling import mix, start, step

pytestmark = gpu.MARKS
SIZE = gpu.either(151_936, 3000)


@contextmanager
def no_waits() -> Iterator[None]:
    """Let every operation that waits for the GPU raise RuntimeError."""
    if gpu.REHEARSAL:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tokens_of_any_rows_are_those_of_single_rows_on_the_cpu() -> None:
    """Penalties, biases, lists of ids, log probabilities, grammars and drafts, for three steps.

    Sums are added in another order, so a random number at the border of two tokens may draw the other one.
    """
    requests = mix() * gpu.either(4, 1)
    (sampler, rows), (alone, twins) = start(requests, batched=True), start(requests, batched=False)
    generator = torch.Generator().manual_seed(1)
    differing = 0
    for number in range(3):
        logits = torch.randn(len(rows), SIZE, generator=generator) * 4
        x, result = logits.to(gpu.DEVICE), StepResult()
        torch.argmax(x + 1, -1).tolist()  # libraries are loaded
        with no_waits() if number else warnings.catch_warnings():
            pending = sampler.launch(x, rows)
        pending.finish(result)
        expected = step(alone, twins, logits)
        assert result.failures == expected.failures == {}
        tokens = pending.tokens.tolist()
        for i, ((seq, drafts), (twin, _)) in enumerate(zip(rows, twins, strict=True)):
            ours, theirs = result.sampled[seq.id], expected.sampled[seq.id]
            if drafts < len(ours) and pending.final[i]:
                assert tokens[i] == ours[drafts].token
            if drafts:
                continue
            if [pick.token for pick in ours] != [pick.token for pick in theirs]:
                assert not seq.sampling.greedy
                differing += 1
            elif seq.sampling.logprobs:
                assert [pick.logprob for pick in ours] == pytest.approx(
                    [pick.logprob for pick in theirs], abs=1e-4
                )
                assert [[token for token, _ in pick.top] for pick in ours] == [
                    [token for token, _ in pick.top] for pick in theirs
                ]
            for each in (seq, twin):
                each.append([pick.token for pick in theirs])
                each.drafts = []
        kept = [i for i, (_, drafts) in enumerate(rows) if not drafts]
        rows, twins = [rows[i] for i in kept], [twins[i] for i in kept]
    assert differing <= 3


def test_flat_rows_are_drawn_from_all_tokens() -> None:
    """Their candidates are more than NUCLEUS_GUESS tokens, so the host waits twice."""
    params = [{"seed": 1, "top_p": 0.9}, {"seed": 2, "min_p": 0.01}, {"seed": 3, "top_k": 2 * NUCLEUS_GUESS}]
    requests = [mix()[0] | {"params": each} for each in params]
    logits = torch.rand(3, SIZE, generator=torch.Generator().manual_seed(1))
    picks = []
    for batched, x in ((True, logits.to(gpu.DEVICE)), (False, logits)):
        sampler, rows = start(requests, batched=batched)
        pending = sampler.launch(x, rows)
        assert not batched or pending.final == [False, False, True]
        result = StepResult()
        pending.finish(result)
        picks.append(
            [
                int(logits[i].argsort(descending=True).argsort()[result.sampled[seq.id][0].token])
                for i, (seq, _) in enumerate(rows)
            ]
        )
    assert picks[0] == pytest.approx(picks[1], abs=SIZE / 1000), (
        "neighbours among the candidates, where rounding decides"
    )
